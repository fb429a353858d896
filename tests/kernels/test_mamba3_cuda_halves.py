"""A scan whose heads are split in two is the same scan, forward and backward."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import wide_heads
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, padded_angles
from tests.scan_inputs import ScanSizes as Sizes
from tests.scan_inputs import random_inputs

SIZES = Sizes(batch=2, length=19, heads=4, groups=2, state=16, width=8, ranks=2)


def inputs_of(*, shared_angles=False, without=(), started=False):
    inputs = random_inputs(SIZES)
    doubled = {name: getattr(inputs, name).double() for name in inputs.names}
    if shared_angles:
        doubled["angles"] = doubled["angles"][:, :, :1].contiguous()
    if started:
        doubled["entering"] = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(2)).double()
    return replace(inputs, **doubled | dict.fromkeys(without), segment_ids=torch.arange(19).div(7).int().expand(2, -1))


def run(inputs, grad_out=None):
    """Return output, final state, gradient of the output and gradients by name."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in inputs.names}
    result = mamba3_mimo(replace(inputs, **leaves), return_final_state=True)
    if grad_out is None:
        grad_out = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad(result.out, list(leaves.values()), grad_out)
    return result.out.detach(), result.final_state.state.detach(), grad_out, dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize(
    "changes",
    [{}, {"shared_angles": True}, {"without": ("phi",)}, {"without": ("z", "zeta", "D")}, {"started": True}],
    ids=str,
)
def test_split_scan_joined_again_is_the_scan(changes):
    inputs = inputs_of(**changes)
    out, state, grad_out, grads = run(inputs)
    split_out, split_state, _, split_grads = run(wide_heads.split(inputs), wide_heads.split_width(grad_out))
    assert split_out.shape[-2:] == (8, 4)
    torch.testing.assert_close(wide_heads.joined_width(split_out), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wide_heads.joined_width(split_state, heads_at=1), state, rtol=1e-6, atol=1e-6)
    joined = {name: wide_heads.joined_gradient(name, grad, 8) for name, grad in split_grads.items()}
    for name, grad in grads.items():
        torch.testing.assert_close(
            joined[name], grad, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("state", "width", "rank", "needed"),
    [
        (16, 128, 8, True), (64, 128, 1, True), (256, 128, 4, True),
        (64, 128, 4, False), (128, 128, 4, False), (64, 64, 1, False),
        (64, 256, 4, False),  # 256 is no width of this lane, whole or halved
        (256, 128, 8, False),  # heads of 64 do not fit either, and the reason names what was asked for
    ],
)  # fmt: skip
def test_heads_are_halved_only_where_nothing_else_fits(state, width, rank, needed):
    shape = ScanShape(B=1, S=1024, H=8, G=1, N=state, P=width, R=rank, A=padded_angles(state // 4, state))
    assert wide_heads.must_split(shape) is needed
