"""Losses of other packages, projections in float8 and experts on an H100 or H200, against float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from ablate.model.config import ExpertsConfig, HybridConfig
from ablate.model.layers.experts import Experts
from ablate.model.layers.linear import Linear
from ablate.model.training.loss import cross_entropy

PACKAGES = {"liger": "liger_kernel", "quack": "quack"}
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # other packages warn about their own parts


def expected(hidden, weight, targets, valid):
    logits = functional.linear(hidden.double(), weight.bfloat16().double())
    losses = functional.cross_entropy(logits.flatten(0, -2), targets.flatten().clamp_min(0), reduction="none")
    return losses.where(valid.flatten(), 0).sum() / valid.sum().clamp_min(1)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["dense", "compiled", "chunked", "liger", "quack"])
def test_loss_and_gradients_match_float64(kind, share):
    if kind in PACKAGES:
        pytest.importorskip(PACKAGES[kind])
    generator = torch.Generator("cuda").manual_seed(7)
    for tokens, width, vocabulary in ((1, 64, 512), (300, 128, 1000), (1024, 256, 32768)):
        hidden = torch.randn(1, tokens, width, generator=generator, device="cuda").bfloat16().requires_grad_()
        weight = (torch.randn(vocabulary, width, generator=generator, device="cuda") * 0.05).requires_grad_()
        targets = torch.randint(0, vocabulary, (1, tokens), generator=generator, device="cuda")
        valid = torch.rand(1, tokens, generator=generator, device="cuda") < share
        targets = targets.where(valid, -1)
        loss = cross_entropy(hidden, weight, targets, valid, kind)
        want = expected(hidden, weight, targets, valid)
        assert loss.dtype == torch.float32
        assert float((loss - want).abs()) < 2e-3 * float(want.clamp_min(1))
        grads, expected_grads = (torch.autograd.grad(-2.5 * value, (hidden, weight)) for value in (loss, want))
        for got, gradient in zip(grads, expected_grads, strict=True):
            assert float((got.double() - gradient.double()).norm()) <= 0.012 * float(gradient.double().norm()) + 1e-12


@pytest.mark.parametrize(("products", "limits"), [("fp8_forward", (0.06, 0.01, 0.01)), ("fp8", (0.06, 0.12, 0.01))])
def test_float8_projections_stay_within_their_formats_rounding(products, limits):
    generator = torch.Generator("cuda").manual_seed(3)
    for tokens, inputs, outputs, size in (
        (16, 16, 32, 1.0),
        (64, 128, 48, 1e-6),
        (256, 512, 1040, 3e4),
        (32, 32, 16, 0),
    ):
        layer = Linear(inputs, outputs, compute_dtype=torch.bfloat16, products=products).cuda()
        with torch.no_grad():
            layer.weight.normal_(std=inputs**-0.5, generator=generator)
        x = (size * torch.randn(2, tokens, inputs, generator=generator, device="cuda")).bfloat16().requires_grad_()
        upstream = torch.randn(2, tokens, outputs, generator=generator, device="cuda").bfloat16()
        y = layer(x)
        got = (y, *torch.autograd.grad(y, (x, layer.weight), upstream))
        wide, weight = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
        want_y = functional.linear(wide, weight)
        want = (want_y, *torch.autograd.grad(want_y, (wide, weight), upstream.double()))
        for actual, exact, limit in zip(got, want, limits, strict=True):
            assert float((actual.double() - exact).norm()) <= limit * float(exact.norm())


@pytest.mark.parametrize("products", ["grouped", "loop"])
def test_experts_and_their_gradients_match_float64(products):
    generator = torch.Generator("cuda").manual_seed(5)
    for tokens, width, number, top_k in ((1, 64, 4, 1), (300, 128, 16, 4), (2048, 256, 8, 2)):
        config = HybridConfig(
            d_model=width,
            pattern="E",
            experts=ExpertsConfig(num_experts=number, top_k=top_k, width=96, shared_width=64, products=products),
        )
        layer = Experts(config, compute_dtype=torch.bfloat16).cuda()
        for parameter in layer.parameters():
            parameter.data.normal_(generator=generator).mul_(parameter.shape[1] ** -0.5)
        x = torch.randn(1, tokens, width, generator=generator, device="cuda").bfloat16().requires_grad_()
        upstream = torch.randn(1, tokens, width, generator=generator, device="cuda").bfloat16()
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
        got = [layer(x, ids), *torch.autograd.grad(layer(x, ids), (x, *layer.maps.parameters()), upstream)]
        exact = Experts(replace(config, experts=replace(config.experts, products="loop")), compute_dtype=torch.float64)
        exact = exact.cuda()
        for own, other in zip(exact.parameters(), layer.parameters(), strict=True):
            own.data = other.detach().clone()
        wide = x.detach().double().requires_grad_()
        out = exact(wide, ids)
        want = [out, *torch.autograd.grad(out, (wide, *exact.maps.parameters()), upstream.double())]
        for a, b in zip(got, want, strict=True):
            assert float((a.double() - b.double()).norm()) <= 0.02 * float(b.double().norm())
