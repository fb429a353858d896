"""What `ablate nodes` and the overview say of a node."""

import io
from typing import Any

import pytest
from rich.console import Console

from experiments.analysis.noise.calibrate import calibrate, key_of
from experiments.design.plan import make_plan
from experiments.records.messages import DeviceInfo
from service.cli import tables
from service.schemas.nodes import CalibrationPublic, NodePublic
from service.web.overview import calibrated
from tests.calibrations import noisy_blocks
from tests.factories import make_receipt, make_spec

SERIAL = "1652923041577"
SPEC = make_spec()
KEY = key_of(SPEC, make_receipt(make_plan(SPEC), 0, "baseline")).model_copy(update={"device_serial": SERIAL})


def node(**changes: Any) -> NodePublic:
    values = {
        "id": "nod_1",
        "name": "vm",
        "node_class": "cpu",
        "health": "live",
        "state": "works",
        "devices": [DeviceInfo(index=0, name="x", memory_bytes=1, serial=SERIAL)],
        "devices_free": 1,
        "code_digest": "sha256:c",
        "registered_at": "2026-11-22T00:00:00.000Z",
        "seen_at": "2026-11-22T00:00:00.000Z",
        **dict.fromkeys(("quarantined_reason", "stopped_by", "stopped_at", "lanes", "public_key")),
        **{"versions": {}, "lacks": [], "runs": []},
    }
    return NodePublic.model_validate(values | changes)


def printed(row: NodePublic) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(tables.nodes([row]))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def test_a_silent_node_takes_no_work() -> None:
    assert "live yes" in printed(node())
    assert "silent no, it is silent; start its worker" in printed(node(health="silent"))


@pytest.mark.parametrize("blocks", [2, 5, 19, 20, 60])
def test_a_node_with_too_few_blocks_is_not_calibrated_yet(blocks: int) -> None:
    found = calibrate(KEY, noisy_blocks(blocks))
    problem = "it is old"
    told = calibrated(node(), [CalibrationPublic(calibration=found, problem=problem, mended_by=None)])
    if blocks < 20:
        assert told == f"uncalibrated: {blocks} of 20 A/A blocks"
    else:
        assert told.startswith("calibrated ")
        assert told.endswith(f"no longer valid: {problem}")
    assert calibrated(node(devices=[]), []) == "uncalibrated"
