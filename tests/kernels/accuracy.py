"""Errors of a scan against the float64 reference.

global = max |got - reference| / max |reference|; row = max over time of ||got_t - reference_t|| / ||reference_t||.
Some exact values vanish: the gradients of decay and angle are zero at a document's first token, and everywhere for a
row of one token. So a row's norm counts at least a tenth of the root mean square row, and a tensor's maximum at least
`VANISHING`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests.kernels.problem import Case

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

Errors: TypeAlias = dict[str, tuple[float, float]]
"""Name of an output or gradient -> (global error, worst row error)."""


def make_final_grad(case: Case, device: str = "cuda") -> Tensor | None:
    """Return a random gradient of the final state, float32 [B,H,N,P]; None if the problem has none."""
    gen = torch.Generator(device=device).manual_seed(case.seed + 2)
    size = (case.B, case.H, case.N, case.P)
    return torch.randn(size, generator=gen, device=device) if case.ended else None


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fill every buffer from torch.empty with NaN, so that an output that nothing writes fails its check."""
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
    """Return the errors of every output; for a tensor with a batch axis those of its worst row."""
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
