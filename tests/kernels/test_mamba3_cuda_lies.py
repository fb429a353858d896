"""Switches of the cuda lane that were asked for and are not live: every scan below runs the kernels of the default.

They are compiled for sm_90a and taken apart, but not launched, so no GPU is needed.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("tilelang")

from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.gate_readings import GateReading, read_gates
from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import attest, compiled, op
from ablate.kernels.mamba3_mimo.cuda.host.sizes import shape_of, sizes_of
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.host_time import unlaunched
from tests.kernels.problem import Case, make_grad, make_inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(attest.disassembler() is None, reason="needs cuobjdump"),
]
CASE = Case(B=1, S=600, H=2)
ASKED: dict[str, Any] = {
    "schedule": "sequential",
    "chunk_size": 8,
    "superchunk": 512,
    "psiv_cache": True,
    "tma": False,
    "warp_specialize": True,
    "aggressive_smem_merge": True,
    "layout_2d": False,
    "pipeline_stages": 2,
    "fast_math": False,
}
OF_THE_HOST: dict[str, Any] = {"remat": True, "heads_in_turn": 2}
"""What the same kernels do, launched in another way."""


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: nothing is computed."""
    return


@pytest.fixture(scope="module")
def kernels_of_the_default() -> Iterator[None]:
    """Let whatever is asked for be served with the default's kernels, of which a pass knows nothing."""
    shape, plain = shape_of(sizes_of(make_inputs(CASE, "cpu")), Variant()), compiled.kernel
    with unlaunched(), patch.object(op, "kernel", lambda name, *_: plain(name, shape, Variant())):
        yield


def readings(**switches: Any) -> dict[str, GateReading]:
    """Return what a receipt reads after a forward and a backward pass with these switches."""
    inputs = make_inputs(CASE, "cpu")
    leaves = inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors()))
    asked = ScanSwitches(lane=Lane.CUDA, **switches)
    with facts.collect() as said:
        out = mamba3_mimo(leaves, asked).out
        torch.autograd.grad(out, leaves.tensors(), make_grad(inputs, 1))
    return read_gates({"lane": "cuda"} | {name: getattr(asked, name) for name in (*ASKED, *OF_THE_HOST)}, said)


def test_every_gate_of_the_kernels_is_lied_about() -> None:
    assert set(ASKED) == {name for name, gate in GATES.items() if gate.in_kernels}


@pytest.mark.usefixtures("kernels_of_the_default")
def test_readings_of_the_default_are_live_and_all_observed() -> None:
    by_gate = readings()
    assert {name: reading for name, reading in by_gate.items() if not reading.live or reading.observed is None} == {}


@pytest.mark.usefixtures("kernels_of_the_default")
@pytest.mark.parametrize("gate", ASKED)
def test_a_switch_that_was_asked_for_and_is_not_live_is_found(gate: str) -> None:
    reading = readings(**{gate: ASKED[gate]})[gate]
    assert not reading.live
    assert reading.observed is not None


@pytest.mark.usefixtures("kernels_of_the_default")
@pytest.mark.parametrize(
    ("gate", "live"), [("remat", True), ("remat", False), ("heads_in_turn", 1), ("heads_in_turn", 2)]
)
def test_what_the_host_does_is_seen(gate: str, live: Any) -> None:
    """States that were kept are no remat; two sums are no sum of two heads."""
    asked, value = op._variant, OF_THE_HOST[gate]
    with patch.object(op, "_variant", lambda *switches: replace(asked(*switches), **{gate: live})):
        reading = readings(**{gate: value})[gate]
    assert (reading.observed, reading.live) == (live, live == value)


@pytest.mark.usefixtures("kernels_of_the_default")
def test_the_default_with_sequential_kernels_is_found() -> None:
    """States are handed between super-chunks of which the walks know nothing."""
    shape = shape_of(sizes_of(make_inputs(CASE, "cpu")), Variant(schedule="sequential"))
    plain, served = compiled.kernel, op.kernel
    op._attested.cache_clear()
    walks = {name: plain(name, shape, Variant(schedule="sequential")) for name in ("outputs", "gradients")}
    with patch.object(op, "kernel", lambda name, *rest: walks.get(name) or served(name, *rest)):
        by_gate = readings()
    op._attested.cache_clear()
    assert not by_gate["schedule"].live
