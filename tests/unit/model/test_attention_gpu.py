"""Every attention implementation on an H100 or H200: values and gradients under document masks."""

import pytest
import torch

from ablate.model.back_end_limits import FA4_WIDTHS, NEVER_CAPPED, NO_WINDOW, RULED_WIDTHS
from ablate.model.layers.attention import ATTEND, PLAIN, ScoreRules

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # packages of kernels warn about their own parts


def operands(batch, length, documents, kv_heads=4, width=64):
    generator = torch.Generator(device="cuda").manual_seed(length)
    q, k, v = torch.randn(3, batch, length, 4, width, generator=generator, device="cuda", dtype=torch.bfloat16)
    k, v = k[:, :, :kv_heads].contiguous(), v[:, :, :kv_heads].contiguous()
    cuts = torch.rand(batch, length, generator=generator, device="cuda").argsort(1)[:, : documents - 1]
    ids_BS = torch.zeros(batch, length, dtype=torch.int64, device="cuda").scatter_(1, cuts, 1).cumsum(1)
    return [t.requires_grad_() for t in (q, k, v)], ids_BS


def results(attend, leaves, ids_BS, width=64, rules=PLAIN):
    out = attend(*leaves, ids_BS, rules)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) * torch.linspace(-1, 1, width, device="cuda").to(out))
    return [out.detach().double(), *(grad.double() for grad in grads)]


@pytest.mark.parametrize("length", [300, 1024])
@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("backend", ["sdpa", "flash", "fa4", "cudnn", "flex"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_values_and_gradients_match_float64(compiled, backend, documents, length):
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute")
    leaves, ids_BS = operands(2, length, documents)
    compare(backend, leaves, ids_BS, compiled=compiled)


@pytest.mark.parametrize("width", RULED_WIDTHS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("softcap", "window"), [(0.0, 1), (0.0, 129), (2.0, 0), (2.0, 50)])
@pytest.mark.parametrize("backend", ["sdpa", "flash", "fa4", "cudnn", "flex"])
def test_shared_heads_windows_and_capped_scores_match_float64(backend, softcap, window, kv_heads, width):
    if (softcap and backend in NEVER_CAPPED) or (window and backend in NO_WINDOW):
        pytest.skip("its kernel has none")
    if backend == "fa4":
        pytest.importorskip("flash_attn.cute")
    for length, documents in ((300, 1), (700, 6)):
        leaves, ids_BS = operands(2, length, documents, kv_heads, width)
        compare(backend, leaves, ids_BS, ScoreRules(softcap, window))


def compare(backend, leaves, ids_BS, rules=PLAIN, *, compiled=False):
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    width = leaves[0].shape[-1]
    attend = torch.compile(ATTEND[backend]) if compiled else ATTEND[backend]
    both = (results(one, own, ids_BS, width, rules) for one, own in ((attend, leaves), (ATTEND["sdpa"], wide)))
    for got, want in zip(*both, strict=True):
        largest = float(want.abs().max())
        if largest < 1e-6:  # a token that sees itself alone has no gradient of q and k
            largest = 1.0
        assert float((got - want).abs().max()) < 0.012 * largest


def test_fa4_matches_float64_on_drawn_shapes_and_documents_and_repeats_itself_to_the_bit():
    pytest.importorskip("flash_attn.cute")
    generator = torch.Generator().manual_seed(20261126)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(24):
            batch, heads, length = draw(1, 3), draw(1, 5), draw(1, 700)
            width = FA4_WIDTHS[draw(0, len(FA4_WIDTHS) - 1)]
            shape = (batch, length, heads, width)
            leaves = [torch.randn(shape, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3)]
            changes = torch.rand(batch, length, generator=generator) < 10.0 ** -draw(0, 3)  # from one token a document
            ids_BS = changes.cumsum(1).cuda()
            first, second = (results(ATTEND["fa4"], leaves, ids_BS, width) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), shape
            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            for got, want in zip(first, results(ATTEND["sdpa"], wide, ids_BS, width), strict=True):
                assert float((got - want).abs().max() / want.abs().max().clamp_min(1e-3)) < 0.02, shape
    finally:
        torch.use_deterministic_algorithms(False)
