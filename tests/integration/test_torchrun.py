"""Commands of torchrun with two ranks over gloo: real process groups, and ranks that fail at a drawn step."""

import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.plan_file import make_plan_file, plan_file_text
from ablate.experiments.system.processes import descendants_of
from ablate.workers.devices.device_lock import DeviceLock, lock_addresses
from ablate.workers.trials.result import TrialResult
from tests.architecture.pages import ROOT
from tests.integration.worker_service import is_gone
from tests.programs import program_config, ran, write_program
from tests.waiting import until

LAUNCH = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
TRAIN = """
import ablate, os, signal, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
with ablate.trial(seed=7) as trial:
    for step in trial.steps():
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value)
        if (rank, step.index) == ({rank}, {at}):
            {fault}
        step.report(loss=value, tokens={tokens})
    trial.report(summed=value)
dist.destroy_process_group()
"""


def run(tmp_path: Path, *, rank: int = -1, at: int = -1, fault: str = "pass", tokens: str = "10") -> TrialResult:
    folder = write_program(tmp_path / "code", TRAIN.format(rank=rank, at=at, fault=fault, tokens=tokens))
    return ran(program_config(folder, command=LAUNCH, env={"OMP_NUM_THREADS": "1"}), tmp_path / "home")


def test_two_ranks_train_together(tmp_path: Path) -> None:
    result = run(tmp_path, tokens="10 if rank else 5")
    assert result.failure_class is None, result.message
    assert result.program is not None
    assert (result.program.ranks, result.program.rank_tokens) == (2, (15, 30))
    assert result.program.reported == {"summed": 3.0}
    assert {(step.tokens, step.loss) for step in result.program_steps} == {(15, 3.0)}
    assert result.peak_allocated_bytes is not None, "on a host it is a resident set"
    assert result.peak_allocated_bytes > 2**26
    assert result.peak_driver_bytes is None


FAULTS: tuple[tuple[str, str], ...] = (
    ("raise ValueError('planted')", "builtins.ValueError: planted"),
    ("os._exit(3)", "exit code 1"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "exit code 1"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "exit code 1"),
    ("dist.destroy_process_group(); os._exit(0)", ""),
    ("dist.all_reduce(torch.zeros(1)); dist.all_reduce(torch.zeros(5)); raise OSError('x')", "builtins."),
)
"""Statements of one rank, and words of the failure; the other rank's own complaint may come first."""


@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_fails_at_any_step_is_a_failure_of_the_program(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    (fault, words), rank, at = FAULTS[seed], chance.randrange(2), chance.randrange(5)
    result = run(tmp_path, rank=rank, at=at, fault=fault)
    assert result.failure_class is FailureClass.USER_ERROR, (fault, rank, at, result)
    message = str(result.message)
    # the rank that lost its peer may speak first, or torchrun may be too slow to speak at all
    other = " raised " in message or f"rank {rank} of 2 died before the end of its trial" in message
    assert words in message or other, (fault, rank, at, message)
    assert "====" not in message


SPEC = {
    "ablation": "killed",
    "question": "Does a killed worker leave ranks?",
    "variants": {"same": {"env": {"UNUSED": "1"}}},
    "design": {"seeds": [7], "blocks": {"count": 6}},
    "placement": {"node_class": "cpu"},
    "verdict": {"primary": {"metric": "tokens_per_s", "margin": "1%"}},
}


def inside(folder: Path) -> list[int]:
    """Return the living processes whose working folder is below `folder`."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder) and not is_gone(int(process.name)):
                pids.append(int(process.name))
    return pids


@pytest.mark.parametrize("ranks", [0, 1, 2, "both in the loop"])
def test_kill_9_of_the_worker_leaves_no_rank_and_no_lock(tmp_path: Path, ranks: int | str) -> None:
    """It dies when this many ranks have started, and one rank never comes back from its third step."""
    loops = "open(f'loop{rank}', 'w').close(); time.sleep(600 * (step.index > 2))"
    source = TRAIN.format(rank="rank", at="step.index", fault=loops, tokens=10)
    began = "open('began' + os.environ['RANK'], 'w').close()\n"
    folder = write_program(tmp_path / "code", source.replace("import torch.d", f"{began}import torch.d"))
    workload = {"command": [*LAUNCH], "code": str(folder), "steps": {"warmup": 1, "timed": 3}}
    plan = tmp_path / "plan.json"
    spec = parse_spec(json.dumps({**SPEC, "workload": workload}).encode(), "application/json")
    text = json.dumps({**SPEC, "workload": workload})
    plan.write_text(plan_file_text(make_plan_file(make_plan(spec), spec_text=text, content_type="application/json")))
    home = tmp_path / "home"
    environment = {**os.environ, "ABLATE_HOME": str(home)}
    command = [
        sys.executable,
        "-m",
        "ablate.workers.offline",
        str(plan),
        "--out",
        str(tmp_path / "bundle"),
        "--no-rehearse",
    ]
    log = tmp_path / "worker.log"
    with log.open("wb") as output:
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=output)
    marks = ["loop0", "loop1"] if isinstance(ranks, str) else [f"began{rank}" for rank in range(ranks)]
    trials = tmp_path / "bundle" / "work"
    until(lambda: worker.poll() is not None or any(trials.glob("att_*/trl_*")))
    until(lambda: worker.poll() is not None or all(any(trials.glob(f"*/*/code/{mark}")) for mark in marks))
    assert worker.poll() is None, log.read_text()
    family = set(descendants_of([worker.pid]))
    worker.kill()
    worker.wait()
    until(lambda: all(map(is_gone, family)) and not inside(tmp_path))
    cores = [f"core {core}" for core in sorted(os.sched_getaffinity(0))]
    for holder in ("block", "trainer"):
        with DeviceLock(lock_addresses(cores, holder=holder, scope=f"home {home.resolve()}")):
            pass
