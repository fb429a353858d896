"""The correction of a span's sum: how it is shared among the tokens."""

import torch

from ablate.kernels.mamba3_mimo.cuda.host.final_state import Span, missing, shares


def drawn(generator: torch.Generator) -> tuple[Span, torch.Tensor, torch.Tensor]:
    batch, heads, tokens = (int(torch.randint(1, high, (), generator=generator)) for high in (4, 4, 40))
    first_B = torch.randint(0, tokens, (batch,), generator=generator)
    inside_Bn = torch.arange(tokens) >= first_B.unsqueeze(1)
    span = Span(slice(0, tokens), inside_Bn, torch.rand(batch, generator=generator) < 0.5)
    decay = -(10.0 ** float(4 * torch.rand((), generator=generator) - 3)) * torch.rand(
        batch, heads, tokens, generator=generator
    )
    return span, decay, torch.rand(batch, heads, tokens, generator=generator) + 1e-3


def test_the_shares_of_a_span_are_those_of_its_writes_and_add_up_to_one() -> None:
    generator = torch.Generator().manual_seed(20261126)
    for _ in range(200):
        span, adt, scale = drawn(generator)
        share = shares(span, adt, scale).double()
        torch.testing.assert_close(share.sum(-1), torch.ones_like(share[..., 0]), rtol=1e-5, atol=1e-6)
        for b, h in ((0, 0), (share.shape[0] - 1, share.shape[1] - 1)):
            left = adt[b, h].double().flip(0).cumsum(0).flip(0) - adt[b, h].double()
            weight = (left.exp() * scale[b, h].double() * span.inside_Bn[b]) ** 2
            torch.testing.assert_close(share[b, h, :-1], (weight / weight.sum() / 2)[:-1], rtol=1e-4, atol=1e-7)
        assert (share[~span.inside_Bn.unsqueeze(1).expand_as(share)] == 0).all()


def test_a_corrected_span_sums_to_the_edge_at_its_start() -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(100):
        span, adt, scale = drawn(generator)
        batch, heads, tokens = adt.shape
        own = torch.randn(batch, heads, tokens, 3, generator=generator)
        begin, end = torch.randn(2, batch, heads, 3, generator=generator)
        corrected = own + missing(own, span, shares(span, adt, scale), begin, end)
        total = (corrected * span.inside_Bn[:, None, :, None]).sum(2)
        expected = begin * span.goes_on_B[:, None, None]
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
