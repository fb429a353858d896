"""One step over several devices: four virtual ones of this machine's processors, each test in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.xla_environment import DEVICE  # isort: skip - it skips the module without the lane

from kernels import xla_compiler
from kernels.backends import NODE_CLASSES
from tests.corpora import small_dataset

pytestmark = pytest.mark.timeout(900)
ENVELOPE = 2e-3
"""Nats: the same sums, grouped by device."""


def told(home: Path, **asked: Any) -> dict[str, Any]:
    """Train or trace in a fresh process as `tests.xla.mesh_program.run` is asked; return what it told."""
    assert DEVICE.type == "xla"
    environment = {**os.environ, **NODE_CLASSES["xla-cpu"].environment, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-m", "tests.xla.mesh_program", json.dumps({"home": str(home), **asked})]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    small_dataset(folder)
    return folder


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Any]:
    return told(home, devices=1)


@pytest.mark.parametrize("sharding", ["fsdp", "replicated"])
def test_four_devices_train_as_one_and_say_how_their_matrices_lie(
    home: Path, alone: dict[str, Any], sharding: str
) -> None:
    together = told(home, devices=4, sharding=sharding)
    assert together["losses"] == pytest.approx(alone["losses"], abs=ENVELOPE)
    assert together["loss_val"] == pytest.approx(alone["loss_val"], abs=ENVELOPE)
    assert together["compilations"] == alone["compilations"] == [1] + [0] * (len(alone["losses"]) - 1)
    assert (together["facts"]["mesh.sharding"], together["facts"]["mesh.devices"]) == (sharding, 4)
    assert together["not_live"] == []
    assert "mesh.sharding" not in alone["facts"]


def test_matrices_that_are_whole_although_they_should_be_divided_are_found(home: Path) -> None:
    assert told(home, devices=4, sharding="fsdp", lie="undivided")["not_live"] == ["sharding"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"pattern": "MM", "scan_layers": True}, "scan_layers with 4 devices"),
        ({"schedule": "sequential"}, "schedule 'sequential' runs on one device, not on 4"),
        ({"attention": "flash"}, "attention 'flash' is a kernel, which cannot be divided over 4 devices"),
        ({"d_model": 34, "num_heads": 1, "headdim": 17, "vocab_size": 511}, "4 devices divide neither axis"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_several_devices_cannot_share_is_refused(home: Path, asked: dict[str, Any], reason: str) -> None:
    assert reason in told(home, devices=4, trace=True, **asked)["refused"]


@pytest.mark.slow
@pytest.mark.skipif(xla_compiler.refusal() is not None, reason=str(xla_compiler.refusal()))
def test_dividing_the_matrices_lowers_what_each_of_four_chips_has_to_hold(home: Path) -> None:
    plans = {way: told(home, devices=4, sharding=way, trace=True, compile=True) for way in ("fsdp", "replicated")}
    divided, whole = plans["fsdp"], plans["replicated"]
    assert (divided["chips"], divided["topology"]) == (4, "v6e:2x2")
    assert divided["argument_bytes"] < 0.5 * whole["argument_bytes"]
    assert divided["collectives"]["all-gather"] > whole["collectives"]["all-gather"]
    assert whole["collectives"]["all-reduce"] > 0
