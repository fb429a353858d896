"""What `ablate nodes` and the overview say of a node."""

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console

from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.design.plan import make_plan
from ablate.experiments.records.messages import DeviceInfo
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import small_run
from ablate.model import back_ends
from ablate.model.layers import attention
from ablate.service.cli import tables
from ablate.service.schemas.nodes import CalibrationPublic, NodePublic
from ablate.service.web.nodes_page import node_lines, nodes_page
from ablate.service.web.overview import calibrated
from tests.calibrations import noisy_blocks
from tests.factories import make_receipt, make_spec

REAL_ATTENTION = attention.ATTEND["sdpa"]
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


def test_a_node_shows_its_cores_and_how_many_of_them_others_took() -> None:
    row = node(cores=8)
    assert " x; 8 cores " in printed(row)
    for loads, words in (({}, "0 of 1 device busy; 8 cores"), ({"nod_1": 0.65}, "took 5.2 of 8 cores during its last")):
        (line,) = node_lines([row], [], loads)
        assert words in line.load
    (line,) = node_lines([node()], [], {"nod_1": 0.65})
    assert "took 65 % of the CPU time during its last trial" in line.load.replace("\N{NO-BREAK SPACE}", " ")
    assert "core" not in printed(node())


def test_a_silent_node_takes_no_work() -> None:
    assert "live yes" in printed(node())
    assert "silent no, it is silent; start its worker" in printed(node(health="silent"))


def test_a_quarantined_node_says_when_it_probes_itself() -> None:
    stopped = {"state": "quarantined", "quarantined_reason": "no lane runs", "probe_at": "2026-11-22T10:05:00.000Z"}
    shown = printed(node(**stopped))
    assert "no, quarantined: no lane runs; it probes itself again, 2026-11-22 10:05:00 UTC; or ablate nodes" in shown
    now = printed(node(**stopped, probe_began_at="2026-11-22T10:05:01.000Z"))
    assert "it probes itself since 2026-11-22 10:05:01 UTC, and works again if that passes; or ablate nodes" in now
    by_a_person = printed(node(**{**stopped, "probe_at": None}))
    assert "no, quarantined: no lane runs; ablate nodes resume vm" in by_a_person


@pytest.mark.parametrize("blocks", [2, 5, 6, 20, 60])
def test_a_node_with_too_few_blocks_is_not_calibrated_yet(blocks: int) -> None:
    calibration = calibrate(KEY, noisy_blocks(blocks))
    problem = "it is old"
    (line,) = calibrated(node(), [CalibrationPublic(calibration=calibration, problem=problem, mended_by=None)])
    if blocks < 6:
        assert line == f"uncalibrated for throughput of hybrid-tiny: {blocks} of 6 A/A blocks"
    else:
        assert re.match("calibrated .* ago for throughput of hybrid-tiny, no longer", line)
        assert line.endswith(f"no longer valid: {problem}")
    assert calibrated(node(devices=[]), []) == ("uncalibrated",)


def test_every_calibration_of_a_node_has_a_line_the_newest_first() -> None:
    noise = []
    for number, recipe in enumerate(["one", "two", "three"]):
        calibration = calibrate(KEY.model_copy(update={"recipe": recipe}), noisy_blocks(20))
        own = calibration.model_copy(update={"measured_at": f"2026-11-2{number}T10:00:00.000Z"})
        noise.append(CalibrationPublic(calibration=own, problem=None, mended_by=None))
    elsewhere = KEY.model_copy(update={"device_serial": "another"})
    noise.append(CalibrationPublic(calibration=calibrate(elsewhere, noisy_blocks(20)), problem=None, mended_by=None))
    lines = calibrated(node(), [noise[1], noise[3], noise[2], noise[0]])
    assert [line.rpartition(" of ")[2] for line in lines] == ["three", "two", "one"]


def spoiled(*tensors: Any) -> Any:
    """Return an attention without a mask: right inside of one document, wrong behind it."""
    q, k, v, ids_BS, cap = tensors
    return REAL_ATTENTION(q, k, v, torch.zeros_like(ids_BS), cap)


def test_planted_faults_of_back_ends_show_on_the_page_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons of what is missing and of a wrong kernel come from the small problems themselves."""
    monkeypatch.setitem(attention.ATTEND, "sdpa", spoiled)
    here = torch.device("cpu")
    results = {
        "attention=flash": None,
        "attention=fa4": back_ends.problem("attention=fa4", here),
        "attention=flex": back_ends.problem("attention=sdpa", here),
        "loss=compiled": "crashed: it died before it answered",
        "loss=liger": "it gave no answer, so it may crash",  # of a worker of an earlier version
        "peer": small_run.small_run_problem(Lane.PEER, here),
        "command": "this node takes no commands",
    }
    torch.use_deterministic_algorithms(False)
    one = node(name="one", lanes=results, versions={"torch": "2.11.0"})
    other = node(name="other", lanes={**results, "attention=flex": None}, versions={"torch": "2.12.0"})
    cpu, gpu = nodes_page([node(name="third", node_class="h100"), node(name="new"), other, one])
    headings = [column.heading for column in cpu.results.columns]
    assert {name: [row[place].text for row in cpu.results.rows] for place, name in enumerate(headings)} == {
        "node": ["new", "one", "other"],
        "health": 3 * ["live"],
        "peer": ["not tried", "refused", "refused"],
        "loss=compiled": ["not tried", "crashes", "crashes"],
        "loss=liger": ["not tried", "fails", "fails"],
        "attention=flash": ["not tried", "works", "works"],
        "attention=fa4": ["not tried", "refused", "refused"],
        "attention=flex": ["not tried", "wrong", "works"],
    }
    reasons = {(row[0].text, row[2].text): row[3].text for row in cpu.failures.rows}
    assert "NVIDIA GPU" in reasons["attention=fa4", "one, other"]
    assert "relative error" in reasons["attention=flex", "one"]
    assert reasons["loss=compiled", "one, other"] == "it died before it answered"
    assert reasons["loss=liger", "one, other"] == "it gave no answer, so it may crash"
    assert len(reasons) == 5
    assert cpu.versions.note == "Different between these nodes: torch."
    assert (gpu.results.rows, gpu.failures.rows, gpu.versions.note) == ((), (), ""), "nothing was tried there"
