"""All kernels of the CUDA lane, interpreted on a CPU without rounding, against the reference lane.

The interpreter has the thread indices, barriers and copies in flight of a GPU, see tile_interpreter.py. Only an H100 or
H200 can test layouts, rounding, memory order and the compiler. It alone tests the backward walk whose warp groups have
different roles, because that walk calls its own CUDA functions.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

from ablate.kernels.mamba3_mimo import ScanInputs, mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import scan as host
from ablate.kernels.mamba3_mimo.cuda.host.compiled import program
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels import tile_interpreter
from tests.scan_inputs import ScanSizes, random_inputs

LIMIT = 1e-6
"""Largest difference over largest value. Inputs and results are float32, what lies between is float64."""


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    without: tuple[str, ...] = ()


CASES = {
    "reference": Case(),
    "documents": Case(starts=(20, 33)),
    "documents_at_edges": Case(shape={"heads": 1, "length": 131}, starts=(1, 30, 63, 64, 100, 127, 130)),
    "groups": Case(shape={"heads": 4, "groups": 2, "length": 40}),
    "full_rotary": Case(shape={"rope_fraction": 1.0}),
    "rank_2": Case(shape={"ranks": 2}, switches={"chunk_size": 32, "superchunk": 64}),
    "rank_8": Case(shape={"ranks": 8}, switches={"chunk_size": 8}),
    "wide_state": Case(shape={"state": 128, "heads": 1}),
    "wide_state,rank_2": Case(
        shape={"state": 128, "heads": 1, "ranks": 2}, switches={"chunk_size": 32, "superchunk": 128}, starts=(20, 33)
    ),
    "wide_state,per_rank": Case(shape={"state": 128, "heads": 1, "rope_fraction": 1.0}, without=("phi", "D")),
    "widest_state": Case(shape={"state": 256, "heads": 1, "length": 33}, switches={"chunk_size": 8}),
    "wide_state,psiv_cache=true": Case(
        shape={"state": 128, "heads": 1}, switches={"psiv_cache": True, "pipeline_stages": 0}
    ),
    "narrow_state": Case(shape={"state": 32}),
    "wide_head": Case(shape={"state": 32, "width": 128, "heads": 1}, switches={"chunk_size": 8}),
    "halved_heads": Case(shape={"width": 128, "ranks": 1}, switches={"chunk_size": 64, "superchunk": 64}, starts=(9,)),
    "halved_head": Case(shape={"state": 16, "width": 128, "ranks": 8, "heads": 1}, switches={"chunk_size": 8}),
    "narrow_head": Case(shape={"width": 32}),
    "chunk_size=8": Case(switches={"chunk_size": 8}),
    "sequential": Case(switches={"schedule": "sequential"}),
    "tma=false": Case(switches={"tma": False}),
    "layout_2d=false": Case(switches={"layout_2d": False}),
    "tma=false,layout_2d=false": Case(switches={"tma": False, "layout_2d": False}),
    "pipeline_stages=0": Case(switches={"pipeline_stages": 0}),
    "pipeline_stages=2": Case(switches={"pipeline_stages": 2}),
    "psiv_cache=true": Case(switches={"psiv_cache": True}),
    "ungated": Case(without=("z", "zeta")),
    "per_rank": Case(without=("phi",)),
    "without_D": Case(without=("D",)),
}


class Interpreted(host.Scan):
    """The scan's host code with interpreted kernels; buffers are float64 and start as NaN."""

    def run(self, name: str, *arguments: torch.Tensor | int) -> None:
        tile_interpreter.run(program(name, self.shape, self.variant), *arguments)

    def empty(self, *size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.full(size, float("nan"), dtype=torch.float64)


@lru_cache(maxsize=1)
def problem(name: str) -> tuple[ScanInputs, torch.Tensor]:
    """Return the inputs of a case in float64, with gradients wanted, and the gradient of the output."""
    case = CASES[name]
    shape = ScanSizes(**{"batch": 1, "length": 57, "heads": 2, "groups": 1, "state": 64, "width": 64} | case.shape)
    inputs = random_inputs(shape)
    given = {n: getattr(inputs, n).double().requires_grad_() for n in inputs.names if n not in case.without}
    at = torch.arange(shape.length)
    ids = sum(at >= start for start in case.starts).unsqueeze(0) if case.starts else None
    inputs = replace(inputs, **given, **dict.fromkeys(case.without), segment_ids=ids)
    grad_out = torch.randn(mamba3_mimo(inputs).out.shape, generator=torch.Generator().manual_seed(1))
    return inputs, grad_out.double()  # a float32 that the kernels need not round: sums may cancel


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_match_the_reference(name, monkeypatch):
    monkeypatch.setattr(host, "NARROW", ())  # the kernels' inputs stay float32
    inputs, grad_out = problem(name)
    expected = mamba3_mimo(inputs, ScanSwitches(), return_final_state=True)
    given = {n: getattr(inputs, n) for n in inputs.names}
    scan = Interpreted(inputs, Variant(**{"superchunk": 32} | CASES[name].switches))
    out, final, saved = scan.forward(return_final_state=True)
    errors = {"out": error(out, expected.out.detach()), "state": error(final, expected.final_state.state.detach())}
    gradients = torch.autograd.grad(expected.out, list(given.values()), grad_out)
    computed = scan.backward(grad_out, saved)
    errors |= {n: error(computed[n], gradient) for n, gradient in zip(given, gradients, strict=True)}
    assert {n: e for n, e in errors.items() if not e < LIMIT} == {}
