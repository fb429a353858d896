"""Mamba-3 MIMO scan: a rank-R state space recurrence with trapezoidal input, rotary keys and gated output.

Public: `mamba3_mimo(ScanInputs(...), ...)`, `ScanResult`, `supports`. Under torch.compile the scan is an opaque
call (a graph break): its facts are recorded by the code that runs, and its backward pass recomputes the forward one.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from kernels.mamba3_mimo.options import CUDA_FEATURES, ScanOptions, supports
from kernels.mamba3_mimo.recompute import Form, scan
from kernels.mamba3_mimo.reference import chunk_parallel
from kernels.mamba3_mimo.step import step_form

__all__ = [
    "CUDA_FEATURES",
    "DIFFERENTIABLE",
    "ScanInputs",
    "ScanOptions",
    "ScanResult",
    "mamba3_mimo",
    "supports",
]


class ScanResult(NamedTuple):
    """Output of one scan."""

    out: Tensor
    """o [B,S,H,P], dtype of v."""
    final_state: Tensor
    """S after the last token [B,H,N,P], float32, without gradient."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mamba3_mimo(
    inputs: ScanInputs,
    *,
    lane: Lane = Lane.REFERENCE,
    schedule: str = "chunk_parallel",
    chunk_size: int = 16,
    psiv_cache: bool = False,
    features: tuple[str, ...] = (),
) -> ScanResult:
    """Run the scan and return its output and final state.

    Options: see `ScanOptions`. Records the facts mamba3_mimo.{lane, schedule, chunk_size, psiv_saved_bytes} when it
    runs and psiv_recomputes in the backward pass. Raises KernelUnsupported, with the reason, when the lane cannot run
    this combination; nothing is ever replaced silently.
    """
    options = ScanOptions(
        lane=lane, schedule=schedule, chunk_size=chunk_size, psiv_cache=psiv_cache, features=tuple(features)
    )
    refusal = supports(options, inputs.v.device.type)
    if refusal is not None:
        raise KernelUnsupported(refusal)
    form: Form = step_form if schedule == "sequential" else partial(chunk_parallel, chunk_size=chunk_size)
    return ScanResult(*scan(inputs, form, psiv_cache=psiv_cache))
