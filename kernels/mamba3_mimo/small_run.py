"""A small problem that says at the start of a worker whether a lane works on its device. Letters: see inputs.py."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ablate.kernels.backends import GENERATED_LANES, Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import psiv
from ablate.kernels.mamba3_mimo.reference import step_form
from ablate.kernels.mamba3_mimo.support import supports
from ablate.kernels.scan_switches import ScanSwitches

B, S, H, G, N, P, R, A = 1, 128, 2, 1, 64, 64, 4, 16
"""A shape that every lane can run."""
LIMIT, LIMITS = 0.022, {"dt": 0.035, "trap": 0.03, "angles": 0.055}
"""Largest error of a whole result relative to its size: eight times the noise of operands rounded to bfloat16."""


def small_run_problem(lane: Lane, device: torch.device) -> str | None:
    """Run the problem with its gradients on `lane`; return why the lane does not work on `device`, None if it does."""
    switches = ScanSwitches(lane=lane, schedule="sequential" if lane is Lane.PEER else "chunk_parallel")
    refusal = supports(switches, device.type)
    if refusal is not None:
        return f"refused: {refusal}"
    inputs, grad_out = problem()
    if lane not in GENERATED_LANES:  # only generated kernels need bfloat16, whose rounding would hide other errors
        inputs, grad_out = inputs.with_tensors(tuple(tensor.float() for tensor in inputs.tensors())), grad_out.float()

    def run(moved: ScanInputs) -> Tensor:
        return mamba3_mimo(moved, switches).out

    try:
        results = _results(run, inputs.with_tensors(tuple(tensor.to(device) for tensor in inputs.tensors())), grad_out)
    except KernelUnsupported as error:
        return f"refused: {error}"
    exact = exact_results(inputs, grad_out)
    wrong = [name for name in exact if not _error(results[name], exact[name]) <= LIMITS.get(name, LIMIT)]  # NaN too
    return f"wrong: {', '.join(wrong)}" if wrong else None


def problem() -> tuple[ScanInputs, Tensor]:
    """Return inputs and the gradient of o [B,S,H,P]; q, k, v and z are bfloat16, as kernels take them."""
    gen = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=gen)

    dt = torch.nn.functional.softplus(-3 + normal(B, H, S))
    tensors: dict[str, Any] = {
        "q": normal(B, S, R, G, N).bfloat16(), "k": normal(B, S, R, G, N).bfloat16(),
        "v": normal(B, S, H, P).bfloat16(), "z": normal(B, S, H, P).bfloat16(),
        "q_bias": normal(H, R, N), "k_bias": normal(H, R, N), "psi": normal(H, R, P) / R, "zeta": normal(H, R, P),
        "phi": normal(H, R, P) / R, "D": normal(H), "adt": -dt * uniform(B, H, S), "dt": dt,
        "trap": uniform(B, H, S).bfloat16().float(), "angles": uniform(B, S, H, A),
    }  # fmt: skip
    return ScanInputs(**tensors), normal(B, S, H, P).bfloat16()


def exact_results(inputs: ScanInputs, grad_out: Tensor) -> dict[str, Tensor]:
    """Return o and the gradient of every input by name, by the recurrence in float64."""
    wide = inputs.with_tensors(tuple(tensor.double() for tensor in inputs.tensors()))
    return _results(lambda leaves: step_form(leaves, psiv(leaves.v, leaves.psi))[0], wide, grad_out.double())


def _results(run: Callable[[ScanInputs], Tensor], inputs: ScanInputs, grad_out: Tensor) -> dict[str, Tensor]:
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs.tensors())
    out = run(inputs.with_tensors(leaves))
    gradients = torch.autograd.grad(out, leaves, grad_out.to(out.device))
    return {"out": out.detach(), **dict(zip(inputs.names, gradients, strict=True))}


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.cpu().double() - exact).norm() / exact.norm())
