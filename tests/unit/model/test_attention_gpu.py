"""Every attention implementation on an H100 or H200: values and gradients under document masks."""

import pytest
import torch

from model.layers.attention import ATTEND

pytestmark = pytest.mark.gpu


def operands(batch, length, documents):
    generator = torch.Generator(device="cuda").manual_seed(length)
    q, k, v = torch.randn(3, batch, 4, length, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    cuts = torch.rand(batch, length, generator=generator, device="cuda").argsort(1)[:, : documents - 1]
    ids_BS = torch.zeros(batch, length, dtype=torch.int64, device="cuda").scatter_(1, cuts, 1).cumsum(1)
    return [t.requires_grad_() for t in (q, k, v)], ids_BS


def results(attend, leaves, ids_BS):
    out = attend(*leaves, ids_BS)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out) * torch.linspace(-1, 1, 64, device="cuda").to(out))
    return [out.detach().double(), *(grad.double() for grad in grads)]


@pytest.mark.parametrize("length", [300, 1024])
@pytest.mark.parametrize("documents", [1, 5])
@pytest.mark.parametrize("backend", ["sdpa", "flash", "cudnn", "flex"])
def test_values_and_gradients_match_float64(backend, documents, length):
    leaves, ids_BS = operands(2, length, documents)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for got, want in zip(results(ATTEND[backend], leaves, ids_BS), results(ATTEND["sdpa"], wide, ids_BS), strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 0.012
