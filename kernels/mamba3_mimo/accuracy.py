"""How near an implementation of the scan is to the float64 reference, on the inputs of the official tests.

global = max |got - reference| / max |reference|; row = max over time of ||got_t - reference_t|| / ||reference_t||,
where a row whose exact value nearly vanishes (the gradients of decay and angle at a document's first token are zero)
is measured against a tenth of the root mean square row. A gradient that is below `VANISHING` everywhere (that of decay
and angle for a row of one token is zero) is measured against that. Imports no kernel, so that every lane can be
measured.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.mamba3_mimo import mamba3_mimo
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.scan_switches import ScanSwitches

_poison: Any = torch.utils.deterministic

VANISHING = 1e-3
"""Far below every gradient of the test problems that does not vanish exactly."""
AXES: dict[str, tuple[int | None, int | None, int | None]] = {
    **dict.fromkeys(("q", "k"), (0, 3, None)),
    **dict.fromkeys(("v", "z", "out"), (0, None, -2)),
    **dict.fromkeys(("adt", "dt", "trap", "state", "entering"), (0, None, 1)),
    **dict.fromkeys(("q_bias", "k_bias", "psi", "zeta", "phi", "D"), (None, None, 0)),
    "angles": (0, None, 2),
    "segment_ids": (0, None, None),
}
"""Tensor -> its axes of rows, groups and heads."""
TIME_AXIS = {"out": 1, "q": 1, "k": 1, "v": 1, "z": 1, "angles": 1, "adt": 2, "dt": 2, "trap": 2}

Run: TypeAlias = Callable[[ScanInputs], tuple[Tensor, Tensor]]
"""One way to run the scan: inputs -> (o, final state)."""
Errors: TypeAlias = dict[str, tuple[float, float]]
"""Name of an output or gradient -> (global error, worst row error)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem."""

    B: int = 2
    """Batch."""
    S: int = 512
    """Tokens per row."""
    H: int = 4
    """Value heads."""
    G: int = 1
    """Groups sharing q and k."""
    N: int = 64
    """State size."""
    P: int = 64
    """Head width."""
    R: int = 4
    """MIMO rank."""
    rope: float = 0.5
    """Share of the state that is rotated: 0.5 or 1."""
    documents: int = 1
    """Documents per row."""
    seed: int = 0
    """Of the inputs."""
    cumulated: bool = False
    """Whether the angles are given cumulated."""
    shared_angles: bool = False
    """Whether all heads share one set of angles."""
    without: tuple[str, ...] = ()
    """Optional tensors that are left out."""
    started: bool = False
    """Whether a state enters the rows."""
    ended: bool = False
    """Whether the final state has a gradient, beside the output."""
    gradients: bool = True
    """Whether the backward pass belongs to the problem."""


def make_inputs(case: Case, device: str = "cuda") -> ScanInputs:
    """Return random inputs in the distribution of the official tests.

    q, k, v and z are bf16, as the kernels take them; trap is float32 with values that bf16 holds, because the official
    kernels take it in bf16 and all lanes shall read the same numbers.
    """
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
    tensors = {
        "q": normal(B, S, R, G, N).bfloat16(), "k": normal(B, S, R, G, N).bfloat16(),
        "v": normal(B, S, H, P).bfloat16(), "z": normal(B, S, H, P).bfloat16(),
        "q_bias": normal(H, R, N), "k_bias": normal(H, R, N), "psi": normal(H, R, P) / R, "zeta": normal(H, R, P),
        "phi": normal(H, R, P) / R, "D": normal(H), "adt": -dt * uniform(B, H, S), "dt": dt,
        "trap": uniform(B, H, S).bfloat16().float(),
        "angles": uniform(B, S, 1 if case.shared_angles else H, int(N * case.rope) // 2),
    }  # fmt: skip
    if case.started:
        tensors["entering"] = normal(B, H, N, P)
    given: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in case.without}
    return ScanInputs(**given, segment_ids=segments, angles_cumulated=case.cumulated)


def make_grad(inputs: ScanInputs, seed: int) -> Tensor:
    """Return a random gradient of o, bf16: the shape of v, with the ranks where there is no phi."""
    gen = torch.Generator(device=inputs.v.device).manual_seed(seed)
    ranks = inputs.psi.shape[1:2] if inputs.phi is None else ()
    size = (*inputs.v.shape[:2], *ranks, *inputs.v.shape[2:])
    return torch.randn(size, generator=gen, device=inputs.v.device).bfloat16()


def make_final_grad(case: Case, device: str = "cuda") -> Tensor | None:
    """Return a random gradient of the final state, float32 [B,H,N,P]; None when the problem has none."""
    gen = torch.Generator(device=device).manual_seed(case.seed + 2)
    size = (case.B, case.H, case.N, case.P)
    return torch.randn(size, generator=gen, device=device) if case.ended else None


def scanned(switches: ScanSwitches) -> Run:
    """Return the way to run the scan that `switches` name."""

    def run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        out, state = mamba3_mimo(inputs, switches, return_final_state=True)
        if state is None:
            raise KernelError("no final state was returned although it was asked for")
        return out, state.state

    return run


def outputs(
    run: Run, inputs: ScanInputs, grad_out: Tensor | None, grad_state: Tensor | None = None
) -> dict[str, Tensor]:
    """Return {out, state} of `run`, with `grad_out` also the gradient of every tensor by its name.

    `grad_state` is the gradient of the final state, None where nobody uses it.
    """
    if grad_out is None:
        with torch.no_grad():
            out, state = run(inputs)
        return {"out": out, "state": state}
    leaves = tuple(t.detach().requires_grad_() for t in inputs.tensors())
    results = run(inputs.with_tensors(leaves))
    out, state = results
    used = 1 if grad_state is None else 2
    grads = torch.autograd.grad(results[:used], leaves, (grad_out, grad_state)[:used])
    return {"out": out.detach(), "state": state.detach(), **dict(zip(inputs.names, grads, strict=True))}


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


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> Errors:
    """Return the errors of every output; NaN anywhere gives NaN."""
    errors = {}
    for name, ref in want.items():
        diff = got[name].double() - ref
        overall = (diff.abs().max() / ref.abs().max().clamp_min(VANISHING)).item()
        row = 0.0
        if name in TIME_AXIS:
            axes = [axis for axis in range(ref.dim()) if axis != TIME_AXIS[name]]
            size = ref.pow(2).sum(axes).sqrt()
            floor = (0.1 * size.pow(2).mean().sqrt()).clamp_min(VANISHING)
            row = (diff.pow(2).sum(axes).sqrt() / size.clamp_min(floor)).max().item()
        errors[name] = (overall, row)
    return errors


def compare_rows(got: dict[str, Tensor], want: dict[str, Tensor]) -> Errors:
    """Return the errors of every output, of what rows have of their own those of the worst row of the batch."""
    batched = [name for name in want if AXES[name][0] == 0]

    def row(tensors: dict[str, Tensor], at: int) -> dict[str, Tensor]:
        return {name: tensors[name][at : at + 1] for name in batched}

    each = [compare(row(got, at), row(want, at)) for at in range(want[batched[0]].shape[0])]
    of_all = compare(got, {name: tensor for name, tensor in want.items() if name not in batched})
    return {name: _worst([errors[name] for errors in each]) if name in batched else of_all[name] for name in want}


def _worst(errors: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the larger of each kind of error; NaN is larger than all."""
    overall, row = (max(kind, key=lambda x: (math.isnan(x), x)) for kind in zip(*errors, strict=True))
    return overall, row
