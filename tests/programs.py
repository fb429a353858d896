"""Small training programs without torch, run as trials."""

import multiprocessing
import textwrap
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.kinds.program import ProgramArm
from ablate.experiments.system.isolation import short_link, use_temporary
from ablate.experiments.system.processes import adopt_orphans
from ablate.model.config import StepsConfig
from ablate.workers.commands.code_copy import copy_code
from ablate.workers.commands.program import run_program
from ablate.workers.paths import WorkPaths
from ablate.workers.processes import trial
from ablate.workers.trials.result import TrialOrder, TrialResult, read_result

LOOP = """
import ablate, argparse, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--step", type=float, default=0.0)
seed, step_s = parser.parse_args().seed, parser.parse_args().step
with ablate.trial(seed=seed) as trial:
    for step in trial.steps(1000):
        time.sleep(0.8 * step_s)
        began = time.process_time()
        while time.process_time() - began < 0.2 * step_s:
            pass
        step.report(loss=1.0 / (seed + step.index), tokens=100)
    trial.report(val_bpb=1.5)
"""
"""A loop whose loss depends on its seed, and whose steps take the seconds after --step, a fifth of them working."""


def write_program(folder: Path, source: str = LOOP) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("train.py").write_text(textwrap.dedent(source), encoding="utf-8")
    return folder


def program_config(folder: Path | None, **changes: Any) -> CommandArm:
    fields: dict[str, Any] = {
        "command": ("python", "train.py", "--seed", "{seed}"),
        "code": None if folder is None else str(folder),
        "needs": "tokens",
        "steps": StepsConfig(warmup=1, warmup_s=0.0, timed=3, slice=0, val_rows=0),
        "seed": 7,
    }
    return CommandArm(**{**fields, **changes})


def order_for(config: ProgramArm, home: Path, trial: str = "trl_1") -> TrialOrder:
    paths = WorkPaths(home=home).trial("att_1", trial)
    return TrialOrder(trial_id=trial, config=config, paths=paths, data_dir=home / "data", device_type="cpu")


def ran(config: ProgramArm, home: Path) -> TrialResult:
    """Copy the code and run the program once."""
    order = order_for(config, home)
    order.paths.log.touch()
    if config.code is not None:
        order = replace(order, dataset=copy_code(order).data_folder)
    if config.judge is not None:
        order = replace(order, evaluation=copy_code(replace(order, config=config.judge)).data_folder)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(order, theirs))
    child.start()
    theirs.close()
    answer = ours.recv()
    child.join()
    short_link(child.pid or 0).unlink(missing_ok=True)
    if isinstance(answer, Exception):
        raise answer
    return TrialResult.model_validate_json(answer)


def run_trial(order: TrialOrder) -> TrialResult | None:
    """Run a trial in a process of its own, as a worker does; return its result."""
    process = multiprocessing.get_context("fork").Process(target=trial.main, args=(order,))
    process.start()
    process.join()
    short_link(process.pid or 0).unlink(missing_ok=True)
    return read_result(order.paths.prepared if order.prepare_only else order.paths.result)


def _run(order: TrialOrder, answer: Connection) -> None:
    """Run the program in a process of its own, because a trial ends all processes below its own."""
    adopt_orphans()
    use_temporary(order.paths.temporary)
    try:
        answer.send(run_program(order).model_dump_json())
    except Exception as error:  # for the test
        answer.send(error)
