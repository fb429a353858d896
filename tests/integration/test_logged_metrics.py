"""Metrics from where programs log them: real isolated trials of programs that know nothing of Ablate."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.design.metrics import LoggedMetric
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import report_contradictions
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.isolation.reach import isolation_problem
from ablate.workers.lease import Lease, boot_time_s
from ablate.workers.paths import Usage
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import TrialRunner
from ablate.workers.processes.wake_event import WakeEvent
from ablate.workers.trials.result import TrialResult, read_result
from tests.programs import order_for, program_config, write_program

VALUES = [1.0 / (step + 2) for step in range(5)]
TENSORBOARD = """
import sys
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter()  # runs/<date>_<host>
for step in range(5):
    writer.add_scalar("eval/loss", 1.0 / (step + 2), step * 10)
    writer.add_scalar("train/loss", step, step)
print("METRIC val_loss=0.1")
writer.close()
"""
WANDB = """
import wandb
run = wandb.init(project="of a user")
for step in range(5):
    run.log({"eval/loss": 1.0 / (step + 2), "train": {"loss": step}})
"""
MLFLOW = """
import mlflow
mlflow.set_experiment("of a user")
with mlflow.start_run():
    mlflow.log_param("lr", 0.1)
    for step in range(5):
        mlflow.log_metrics({"eval/loss": 1.0 / (step + 2), "train/loss": step}, step=step)
"""
SQLITE = "import mlflow\nmlflow.set_tracking_uri('sqlite:///mlflow.db')\n" + MLFLOW
PROGRAMS = {"tensorboard": TENSORBOARD, "wandb": WANDB, "mlflow": MLFLOW, "sqlite": SQLITE}


@pytest.fixture(scope="module")
def runner() -> Iterator[TrialRunner]:
    with Guardian() as guardian:
        limit = Usage(bytes=256 * 2**20, files=5_000)
        yield TrialRunner(ForkServer(), guardian, WakeEvent(), grace_s=0.2, preempted=lambda: False, most_output=limit)


Logged = Callable[..., TrialResult]


@pytest.fixture
def logged(tmp_path: Path, runner: TrialRunner) -> Logged:
    """Return what runs a program whose metric is logged."""

    def run(source: str, tracker: Any, **place: Any) -> TrialResult:
        home, own = tmp_path / "home", write_program(tmp_path / "own", source)
        metric = LoggedMetric(tracker=tracker, **{"tag": "eval/loss", **place})
        config = program_config(own, metrics={"val_loss": "lower"}, logged={"val_loss": metric}, needs="process")
        order = order_for(config, home, f"trl_{uuid.uuid4().hex}")
        order = replace(order, dataset=copy_code(order).data_folder, start_by=boot_time_s() + 3600)
        order = order.isolated((home,)) if isolation_problem() is None else order
        ending = runner.run(order, Lease(3600.0, sent_at=boot_time_s()), timeout_s=240.0)
        assert ending.stopped is None
        result = read_result(order.paths.result)
        assert result is not None
        if result.failure_class is None:
            assert result.program is not None
            assert list(report_contradictions(result.program, config, None)) == []
        return result

    return run


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_logs_is_measured_as_it_is(logged: Logged, name: str) -> None:
    result = logged(PROGRAMS[name], "mlflow" if name == "sqlite" else name)
    assert result.failure_class is None, result.message
    report = result.program
    assert report is not None
    assert report.reported["val_loss"] == pytest.approx(VALUES[-1], rel=0 if name != "tensorboard" else 1e-7)
    steps = range(0, 50, 10) if name == "tensorboard" else range(5)
    assert report.curves["val_loss"] == tuple(
        (step, pytest.approx(value, rel=1e-7)) for step, value in zip(steps, VALUES, strict=True)
    )
    assert report.contradicted == ({"val_loss": 0.1} if name == "tensorboard" else {})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TENSORBOARD.replace("1.0 / (step + 2)", "float('nan')"), "the program reported nan as 'val_loss'"),
        (TENSORBOARD.replace("eval/loss", "eval_loss"), "it logged: 'eval_loss', 'train/loss'; did you mean"),
        ("pass", "the program wrote no event file"),
        (TENSORBOARD.replace("writer.close()", "import os; writer.flush(); os.kill(os.getpid(), 9)"), "SIGKILL"),
        (
            TENSORBOARD + "import glob\nfile = open(glob.glob('runs/*/*')[0], 'r+b')\nfile.truncate(300)\n",
            "ends within a record: close the writer before the program ends",
        ),
        ("import os, shutil\nos.symlink('/', 'runs')\nos.symlink('/', 'events.out.tfevents.1')", "wrote no event file"),
    ],
    ids=["nan", "tag", "none", "killed", "torn", "links"],
)
def test_a_program_without_the_number_fails_and_says_why(logged: Logged, source: str, words: str) -> None:
    result = logged(source, "tensorboard")
    assert result.failure_class is FailureClass.USER_ERROR
    assert words in str(result.message)
