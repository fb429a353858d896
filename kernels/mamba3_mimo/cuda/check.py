"""Compare the CUDA lane with the float64 reference lane: global and per-time-row relative errors.

global = max |ours - ref| / max |ref|; row = max over time of ||ours_t - ref_t|| / ||ref_t||, where a row
whose exact value nearly vanishes (the gradients of decay and angle at a document's first token are zero) is measured
against a tenth of the root mean square row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.mamba3_mimo.cuda.scan import chunk_parallel_cuda
from kernels.mamba3_mimo.cuda.variant import Variant
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from kernels.mamba3_mimo.operands import psiv
from kernels.mamba3_mimo.reference import chunk_parallel

_poison: Any = torch.utils.deterministic

GLOBAL_LIMIT, ROW_LIMIT = 0.012, 0.05
TIME_AXIS = {"out": 1, "q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem to check."""

    B: int = 2
    S: int = 512
    H: int = 4
    G: int = 1
    N: int = 64
    P: int = 64
    R: int = 4
    rope: float = 0.5
    documents: int = 1
    seed: int = 0
    cumulated: bool = False


def make_inputs(case: Case, device: str = "cuda") -> ScanInputs:
    """Return random inputs in the distribution of the official tests; bf16 where the kernels take bf16."""
    gen = torch.Generator(device=device).manual_seed(case.seed)
    B, S, H, G, N, P, R = case.B, case.S, case.H, case.G, case.N, case.P, case.R

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=gen, device=device)

    dt = torch.nn.functional.softplus(-3 + normal(B, H, S))
    segments = None
    if case.documents > 1:
        cuts = uniform(B, S).argsort(1)[:, : case.documents - 1]
        segments = torch.zeros(B, S, dtype=torch.int64, device=device).scatter_(1, cuts, 1).cumsum(1)
    return ScanInputs(
        q=normal(B, S, R, G, N).bfloat16(), k=normal(B, S, R, G, N).bfloat16(), v=normal(B, S, H, P).bfloat16(),
        z=normal(B, S, H, P).bfloat16(), q_bias=normal(H, R, N), k_bias=normal(H, R, N), psi=normal(H, R, P) / R,
        zeta=normal(H, R, P), phi=normal(H, R, P) / R, D=normal(H), adt=-dt * uniform(B, H, S), dt=dt,
        trap=uniform(B, H, S), angles=uniform(B, S, H, int(N * case.rope) // 2), segment_ids=segments,
        angles_cumulated=case.cumulated,
    )  # fmt: skip


def reference(inputs: ScanInputs, grad_out: Tensor) -> dict[str, Tensor]:
    """Return output, final state and gradients in float64."""
    leaves = tuple(t.detach().double().requires_grad_() for t in inputs.tensors())
    wide = inputs.with_tensors(leaves)
    out, state = chunk_parallel(wide, psiv(wide.v, wide.psi), chunk_size=16)
    grads = torch.autograd.grad(out, leaves, grad_out.double())
    return {"out": out.detach(), "state": state.detach(), **dict(zip(DIFFERENTIABLE, grads, strict=True))}


def ours(inputs: ScanInputs, grad_out: Tensor, variant: Variant) -> dict[str, Tensor]:
    """Return output, final state and gradients of the CUDA lane."""
    leaves = tuple(t.detach().requires_grad_() for t in inputs.tensors())
    out, state = chunk_parallel_cuda(inputs.with_tensors(leaves), variant)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), "state": state.detach(), **dict(zip(DIFFERENTIABLE, grads, strict=True))}


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fill every buffer made by torch.empty with NaN, so that an output nobody wrote fails its check."""
    deterministic, filled = torch.are_deterministic_algorithms_enabled(), _poison.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _poison.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        _poison.fill_uninitialized_memory = filled


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return {name: (global error, worst row error)}; NaN anywhere gives NaN."""
    errors = {}
    for name, ref in want.items():
        diff = got[name].double() - ref
        overall = (diff.abs().max() / ref.abs().max().clamp_min(1e-30)).item()
        row = 0.0
        if name in TIME_AXIS:
            axes = [axis for axis in range(ref.dim()) if axis != TIME_AXIS[name]]
            size = ref.pow(2).sum(axes).sqrt()
            row = (diff.pow(2).sum(axes).sqrt() / size.clamp_min(0.1 * size.pow(2).mean().sqrt())).max().item()
        errors[name] = (overall, row)
    return errors


def check(case: Case, variant: Variant | None = None) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Return the errors of every output and the names of those over the limits (NaN counts as over)."""
    inputs = make_inputs(case)
    gen = torch.Generator(device="cuda").manual_seed(case.seed + 1)
    grad_out = torch.randn(inputs.v.shape, generator=gen, device="cuda").bfloat16()
    with poisoned_buffers():
        got = ours(inputs, grad_out, variant or Variant())
    errors = compare(got, reference(inputs, grad_out))
    bad = [name for name, (overall, row) in errors.items() if not (overall < GLOBAL_LIMIT and row < ROW_LIMIT)]
    return errors, bad
