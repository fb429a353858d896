"""Refusals, shape errors and facts of the public operation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ablate.kernels import facts
from ablate.kernels.backends import NODE_CLASSES, Lane, device_refusal
from ablate.kernels.errors import KernelUnsupported, ShapeError
from ablate.kernels.mamba3_mimo import DIFFERENTIABLE, mamba3_mimo, supports
from ablate.kernels.mamba3_mimo.support import LANES
from ablate.kernels.scan_switches import ScanSwitches
from tests.scan_inputs import ScanSizes, random_inputs

SHAPE = ScanSizes(batch=1, length=9, heads=2, groups=1, state=8, width=4, ranks=2)


@pytest.mark.parametrize("lane", [Lane.CUDA, Lane.XLA, Lane.PEER])
def test_supports_other_lane_is_refused_with_reason(lane):
    refusal = supports(ScanSwitches(lane=lane), "cpu")
    assert refusal == device_refusal(lane, "cpu")
    assert f"lane '{lane}' has no implementation on node class 'cpu'" in str(refusal)


def test_every_lane_that_a_node_class_lists_runs_the_scan():
    assert {lane for entry in NODE_CLASSES.values() for lane in entry.lanes} == set(LANES)


@pytest.mark.parametrize("lane", sorted(set(LANES) - {Lane.REFERENCE}))
def test_every_lane_is_tested_in_a_file_of_its_name(lane):
    rooms = (Path(__file__).parents[2] / "kernels", Path(__file__).parent)
    assert any(f"_{lane}" in path.stem for room in rooms for path in room.glob("test_*.py"))


def test_mamba3_mimo_other_lane_raises():
    with pytest.raises(KernelUnsupported, match="lane 'cuda' has no implementation on node class 'cpu'"):
        mamba3_mimo(random_inputs(SHAPE), ScanSwitches(lane=Lane.CUDA))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("schedule", ["sequential", "chunk_parallel"])
def test_supports_reference_runs_on_cpu_and_cuda(device, schedule):
    assert supports(ScanSwitches(schedule=schedule), device) is None


@pytest.mark.parametrize(
    ("options", "device", "part"),
    [
        (ScanSwitches(schedule="two_level"), "cpu", "schedule 'two_level' is unknown; known: sequential"),
        (ScanSwitches(chunk_size=0), "cpu", "chunk_size is 0; allowed: at least 1"),
        (ScanSwitches(), "mps", "device type 'mps' is unknown"),
        (ScanSwitches(), "xla", "implemented there: xla"),
    ],
)
def test_supports_names_what_is_wrong(options, device, part):
    assert part in str(supports(options, device))


def test_mamba3_mimo_records_what_ran():
    with facts.collect() as chunked:
        mamba3_mimo(random_inputs(SHAPE), ScanSwitches(chunk_size=8))
    with facts.collect() as stepped:
        mamba3_mimo(random_inputs(SHAPE), ScanSwitches(schedule="sequential"))
    assert chunked == {
        "mamba3_mimo.lane": "reference",
        "mamba3_mimo.schedule": "chunk_parallel",
        "mamba3_mimo.chunk_size": 8,
        "mamba3_mimo.dtype": "float32",
    }
    assert stepped == {
        "mamba3_mimo.lane": "reference",
        "mamba3_mimo.schedule": "sequential",
        "mamba3_mimo.dtype": "float32",
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("z", torch.zeros(1, 9, 2, 5), r"z has shape \[1, 9, 2, 5\]; expected \[1, 9, 2, 4\]"),
        ("k", torch.zeros(1, 9, 2, 1, 12), r"k has shape .* expected \[1, 9, 2, 1, 8\]"),
        ("dt", torch.zeros(1, 9, 2), r"dt has shape \[1, 9, 2\]; expected \[1, 2, 9\]"),
        ("angles", torch.zeros(1, 9, 2, 3), "angles has 3 angles; allowed: N/4 or N/2 with N=8"),
        ("segment_ids", torch.zeros(1, 8, dtype=torch.long), r"segment_ids has shape \[1, 8\]; expected \[1, 9\]"),
        ("segment_ids", torch.zeros(1, 9), "segment_ids has dtype torch.float32; expected an integer dtype"),
        ("v", torch.zeros(1, 9, 2, 4, dtype=torch.bfloat16), "q, k, v and z have dtypes"),
        ("q", torch.zeros(9, 2, 1, 8), "q, v and angles have 4, 4 and 4 axes"),
    ],
)
def test_scan_inputs_wrong_tensor_is_named(name, value, message):
    with pytest.raises(ShapeError, match=message):
        replace(random_inputs(SHAPE), **{name: value})


def test_scan_inputs_heads_not_divisible_by_groups():
    with pytest.raises(ShapeError, match="v has 3 heads; allowed: a multiple of the 2 groups of q"):
        random_inputs(replace(SHAPE, heads=3, groups=2))


def test_scan_inputs_empty_sequence():
    with pytest.raises(ShapeError, match="S=0"):
        random_inputs(replace(SHAPE, length=0))


@pytest.mark.parametrize(("given", "missing"), [("z", "zeta"), ("zeta", "z")])
def test_scan_inputs_half_a_gate_is_refused(given, missing):
    with pytest.raises(ShapeError, match=f"{given} is present without {missing}"):
        replace(random_inputs(SHAPE), **{missing: None})


def test_scan_inputs_names_are_those_given():
    inputs = replace(random_inputs(SHAPE), D=None, phi=None)
    assert set(DIFFERENTIABLE) - set(inputs.names) == {"D", "phi", "entering"}
    assert len(inputs.tensors()) == len(inputs.names)
    assert inputs.with_tensors(inputs.tensors()).phi is None
