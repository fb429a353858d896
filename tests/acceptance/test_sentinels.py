"""Sentinels in a running stack: nobody asks, and the noise of a calibrated node is looked at again and again.

Time's seam is the setting: a calibration is old after seconds instead of a week.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_stack import PAUSE_S, Home
from tests.factories import spec_values
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EVERY_S = 10.0
SPEC = spec_values(
    workload={
        "recipe": "hybrid-tiny",
        "overrides": {"seq_len": 64, "pattern": "M", "max_corpus_mib": 0.5, "vocab_size": 512},
        "steps": {"warmup": 0, "warmup_s": 0.0, "timed": 3, "val_rows": 0},
    },
    baseline={"gates": {"chunk_size": 16}},
    placement={"node_class": "cpu", "max_foreign_load": "99%"},
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    made.environment |= {"ABLATE_SENTINEL_DAYS": str(EVERY_S / 86_400), "ABLATE_CONTROL_EVERY": "0"}
    yield made
    made.run("down")


def answer(home: Home, *arguments: str) -> Any:
    done = home.run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def calibrated(home: Home, spec: Path) -> dict[str, Any]:
    """Run A/A ablations until the node is admitted: one in a hundred is refused by chance."""
    for _ in range(3):
        home.run("aa", "cpu", "--like", str(spec), "--json")
        until(lambda: answer(home, "nodes", "calibration")["items"] != [], pause_s=PAUSE_S)
        (known,) = answer(home, "nodes", "calibration")["items"]
        if known["problem"] is None:
            return dict(known["calibration"])
    raise AssertionError(known["problem"])


def sentinels(home: Home) -> list[dict[str, Any]]:
    return [row for row in answer(home, "list") if "sentinel" in row["labels"] and row["state"] == "completed"]


def test_the_stack_asks_for_sentinels_by_itself_and_counts_what_they_say(home: Home, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    home.up()
    before = calibrated(home, spec)
    assert {block["source"] for block in before["samples"]} == {"calibration"}
    until(lambda: bool(sentinels(home)), pause_s=PAUSE_S)
    until(lambda: blocks_of(home) >= before["blocks"] + 6, pause_s=PAUSE_S)
    (known,) = answer(home, "nodes", "calibration")["items"]
    assert sum(block["source"] == "sentinel" for block in known["calibration"]["samples"]) >= 6
    assert known["calibration"]["variance_p"] is not None
    assert known["calibration"]["key"] == before["key"]


def blocks_of(home: Home) -> int:
    (known,) = answer(home, "nodes", "calibration")["items"]
    return int(known["calibration"]["blocks"])
