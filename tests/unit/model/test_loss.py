import pytest
import torch

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.model.errors import ConfigError
from ablate.model.facts import ModelFact
from ablate.model.training import loss
from ablate.model.training.loss import cross_entropy

VOCAB, WIDTH = 96, 16


def case(dtype=torch.float32, batch=3, length=21):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, length, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    valid = torch.rand(batch, length, generator=generator) > 0.3
    targets = torch.randint(0, VOCAB, (batch, length), generator=generator).masked_fill(~valid, -1)
    return hidden, weight, targets, valid


def expected_loss(hidden, weight, targets, valid):
    """Mean of -log p over the valid tokens, one token at a time, in float64."""
    terms = []
    for b, s in valid.nonzero().tolist():
        logits = weight.double() @ hidden[b, s].double()
        terms.append(torch.logsumexp(logits, 0) - logits[targets[b, s]])
    return torch.stack(terms).mean()


@pytest.mark.parametrize("chunk_tokens", [16, 17, 64, 1024])
@pytest.mark.parametrize("kind", ["dense", "chunked", "torch_linear_ce"])
def test_cross_entropy_matches_definition_with_gradients(kind, chunk_tokens):
    hidden, weight, targets, valid = case()
    expected_value = expected_loss(hidden, weight, targets, valid)
    expected_grads = torch.autograd.grad(expected_value, (hidden, weight))
    loss = cross_entropy(hidden, weight, targets, valid, kind, chunk_tokens)
    grads = torch.autograd.grad(3 * loss, (hidden, weight))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_value.item(), rel=1e-6)
    for grad, expected in zip(grads, expected_grads, strict=True):
        assert torch.allclose(grad, 3 * expected.float(), atol=1e-6)


def test_cross_entropy_chunked_equals_dense_in_bfloat16():
    hidden, weight, targets, valid = case(torch.bfloat16)
    results = []
    for kind in ("dense", "chunked"):
        loss = cross_entropy(hidden, weight, targets, valid, kind, 16)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    assert results[0][0].item() == pytest.approx(results[1][0].item(), rel=1e-6)
    assert results[1][1].dtype == torch.bfloat16
    assert results[1][2].dtype == torch.float32
    for a, b in zip(results[0][1:], results[1][1:], strict=True):
        assert float((a - b).float().norm() / b.float().norm()) < 1e-2


@pytest.mark.parametrize("kind", ["dense", "chunked", "torch_linear_ce"])
def test_cross_entropy_invalid_tokens_change_nothing(kind):
    hidden, weight, targets, valid = case()
    other = hidden.detach().clone()
    other[~valid] = 7.0
    first = cross_entropy(hidden.detach(), weight, targets, valid, kind, 16)
    assert cross_entropy(other, weight, targets.masked_fill(~valid, 5), valid, kind, 16).item() == first.item()
    cross_entropy(hidden, weight, targets, valid, kind, 16).backward()
    assert (hidden.grad[~valid] == 0).all()


@pytest.mark.parametrize("kind", ["dense", "chunked", "torch_linear_ce"])
def test_cross_entropy_without_valid_tokens_is_zero(kind):
    hidden, weight, targets, valid = case()
    loss = cross_entropy(hidden, weight, targets, torch.zeros_like(valid), kind, 16)
    loss.backward()
    assert loss.item() == 0.0
    assert (weight.grad == 0).all()


def test_cross_entropy_chunked_never_holds_all_logits():
    hidden, weight, targets, valid = case(batch=4, length=64)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        cross_entropy(hidden, weight, targets, valid, "chunked", 16)
    assert sum(saved) == hidden.numel() + weight.numel()

    dense = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: dense.append(t.numel()) or t, lambda t: t):
        cross_entropy(hidden, weight, targets, valid, "dense")
    assert max(dense) == 4 * 64 * VOCAB


def test_cross_entropy_chunked_without_gradients():
    hidden, weight, targets, valid = case()
    with torch.no_grad():
        loss = cross_entropy(hidden, weight, targets, valid, "chunked", 16)
    assert loss.item() == pytest.approx(expected_loss(hidden, weight, targets, valid).item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["dense", "chunked"])
def test_cross_entropy_records_what_ran(kind):
    with facts.collect() as seen:
        cross_entropy(*case(), kind, 16)
    assert seen[ModelFact.LOSS] == kind


def test_cross_entropy_unknown_kind():
    with pytest.raises(ConfigError, match="is 'sparse'; allowed: dense, compiled, chunked, torch_linear_ce, liger, q"):
        cross_entropy(*case(), "sparse")


def looped(body, carry, xs):
    """Run the loop of a graph in Python."""
    outputs = []
    for index in range(len(xs[0])):
        carry, output = body(carry, [tensor[index] for tensor in xs])
        outputs.append(output)
    return carry, None if outputs[0] is None else torch.stack(outputs)


@pytest.mark.parametrize("tokens", [15, 16, 17, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loop_over_chunks_computes_the_sums_of_the_chunks(monkeypatch, tokens, dtype):
    monkeypatch.setattr(loss.xla_device, "loop_without_gradients", looped)
    generator = torch.Generator().manual_seed(tokens)
    hidden_TD = torch.randn(tokens, 8, generator=generator).to(dtype)
    weight_VD = torch.randn(300, 8, generator=generator)
    targets_T = torch.randint(0, 300, (tokens,), generator=generator)
    valid_T = torch.rand(tokens, generator=generator) < 0.7
    for with_gradient in (False, True):
        arguments = (hidden_TD, weight_VD, targets_T, valid_T, 16)
        expected = loss._chunked(*arguments, with_gradient=with_gradient)
        actual = loss._in_loop(*arguments, with_gradient=with_gradient)
        for ours, theirs in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["liger", "quack"])
def test_a_loss_for_gpus_is_refused_elsewhere(kind):
    with pytest.raises(KernelUnsupported, match=f"loss '{kind}' runs on an NVIDIA GPU; the hidden states are on cpu"):
        cross_entropy(*case(), kind)


def test_torchs_own_loss_is_refused_by_an_older_torch(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy")
    with pytest.raises(KernelUnsupported, match=r"needs torch 2\.12 or newer"):
        cross_entropy(*case(), "torch_linear_ce")


@pytest.mark.parametrize("kind", ["compiled", "torch_linear_ce", "liger", "quack"])
def test_without_gradients_every_loss_computes_in_chunks(kind):
    hidden, weight, targets, valid = case()
    with torch.no_grad(), facts.collect() as seen:
        loss = cross_entropy(hidden, weight, targets, valid, kind, 16)
    assert loss.item() == pytest.approx(expected_loss(hidden, weight, targets, valid).item(), rel=1e-6)
    assert seen[ModelFact.LOSS] == "chunked"
