"""One step over several devices, four virtual ones of this machine: one process for each number of devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.xla_environment import DEVICE  # isort: skip - it skips the module without the lane

from ablate.kernels.backends import NODE_CLASSES
from ablate.kernels.xla import compiler as xla_compiler
from tests.corpora import small_dataset

pytestmark = pytest.mark.timeout(900)
ENVELOPE = 2e-3
"""Nats: the same sums, grouped by device."""
WAYS = ("fsdp", "replicated")
CANNOT_COMPILE = xla_compiler.refusal()

Answers: TypeAlias = dict[str, dict[str, Any]]


def answers_of(home: Path, devices: int, asked: dict[str, Any]) -> Answers:
    """Train and trace in a fresh process as `tests.xla.mesh_program` is asked; return what it told, by name."""
    assert DEVICE.type == "xla"
    environment = {**os.environ, **NODE_CLASSES["xla-cpu"].environment}
    order = json.dumps({"home": str(home), "devices": devices, "asked": asked})
    command = [sys.executable, "-m", "tests.xla.mesh_program", order]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers: Answers = json.loads(ended.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    small_dataset(folder)
    return folder


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Any]:
    return answers_of(home, 1, {"plain": {}})["plain"]


@pytest.fixture(scope="module")
def together(home: Path) -> Answers:
    asked: dict[str, Any] = {way: {"sharding": way} for way in WAYS}
    asked["honest"], asked["lie"] = {"trace": True}, {"trace": True, "lie": True}
    asked["odd"] = {"trace": True, "d_model": 34, "num_heads": 1, "headdim": 17, "vocab_size": 511}
    if CANNOT_COMPILE is None:
        asked |= {f"plan of {way}": {"sharding": way, "trace": True, "compile": True} for way in WAYS}
    return answers_of(home, 4, asked)


@pytest.mark.parametrize("sharding", WAYS)
def test_four_devices_train_as_one_and_say_how_their_matrices_lie(
    alone: dict[str, Any], together: Answers, sharding: str
) -> None:
    trained = together[sharding]
    assert trained["losses"] == pytest.approx(alone["losses"], abs=ENVELOPE)
    assert trained["loss_val"] == pytest.approx(alone["loss_val"], abs=ENVELOPE)
    assert trained["compilations"] == alone["compilations"] == [1] + [0] * (len(alone["losses"]) - 1)
    assert trained["work"] == alone["work"] == [[1, []]] * len(alone["losses"])
    assert (trained["facts"]["mesh.sharding"], trained["facts"]["mesh.devices"]) == (sharding, 4)
    assert trained["not_live"] == []
    assert "mesh.sharding" not in alone["facts"]


def test_matrices_that_are_whole_although_they_should_be_divided_are_found(together: Answers) -> None:
    assert (together["honest"]["not_live"], together["lie"]["not_live"]) == ([], ["sharding"])


def test_a_matrix_that_four_devices_cannot_divide_is_refused(together: Answers) -> None:
    assert "4 devices divide neither axis" in together["odd"]["refused"]


@pytest.mark.slow
@pytest.mark.skipif(CANNOT_COMPILE is not None, reason=str(CANNOT_COMPILE))
def test_dividing_the_matrices_lowers_what_each_of_four_chips_has_to_hold(together: Answers) -> None:
    divided, whole = (together[f"plan of {way}"] for way in WAYS)
    assert (divided["chips"], divided["partitions"], divided["topology"]) == (4, 4, "v6e:2x2")
    assert divided["input_bytes"] / 4 <= divided["argument_bytes"] < 0.5 * whole["argument_bytes"]
    assert divided["collectives"]["all-gather"] > whole["collectives"]["all-gather"]
    assert whole["collectives"]["all-reduce"] > 0
