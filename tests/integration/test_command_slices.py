"""Programs that take turns in real blocks: their order, what waits with them, and what they cannot do about it."""

import json
import math
import random
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records import receipt_check
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.receipt_clocks import slice_problems
from ablate.experiments.records.receipts import Receipt, read_named
from ablate.experiments.records.spec_code import pack_spec
from ablate.experiments.retries import Break
from ablate.workers.processes.trial_output import BlockOutput
from tests.integration.block_runners import block_runner, endless_lease

YAML = "application/yaml"
PROGRAM = """
import argparse, ablate, multiprocessing, os, threading, time

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int)
parser.add_argument("--work", type=float, default=0.002)
parser.add_argument("--dies-at", type=int, default=-1)
parser.add_argument("--how", default="raises")
parser.add_argument("--out")
options = parser.parse_args()

def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass

def tick(file):
    while True:
        now = time.monotonic()
        with open(file, "a") as ticks:
            ticks.write(f"{now!r} {time.monotonic()!r}\\n")
        time.sleep(0.0005)

multiprocessing.get_context("fork").Process(target=tick, args=(options.out + "/process",), daemon=True).start()
threading.Thread(target=tick, args=(options.out + "/thread",), daemon=True).start()
with ablate.trial(seed=options.seed) as trial:
    for step in trial.steps(10):
        burn(options.work)
        step.report(loss=1.0 / (1 + step.index), tokens=10)
        if step.index == options.dies_at:
            if options.how == "raises":
                raise ValueError("asked to")
            if options.how == "is killed":
                os.kill(os.getpid(), 11)
            os._exit(3)
"""
"""Each step takes the processor seconds after --work; a process and a thread beside it write when they run."""


def in_a_block(folder: Path, arms: Mapping[str, Sequence[str]], *, source: str = PROGRAM, **steps: int) -> "Block":
    """Run one block in slices: arms by the arguments that they add."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    code.joinpath("train.py").write_text(textwrap.dedent(source), encoding="utf-8")
    first, *others = arms
    values = {
        "ablation": "turns",
        "question": "Does it wait?",
        "workload": {
            "command": ["python", "train.py", "--seed", "{seed}", "--out", "{out}"],
            "code": "code",
            "steps": {"warmup": 1, **steps},
        },
        "baseline": {"args": list(arms[first])},
        "variants": {name: {"args": list(arms[name])} for name in others},
        "design": {"seeds": [3], "blocks": {"count": 6}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "cpu_step_s", "margin": "1%"}},
    }
    packed = pack_spec(spec_yaml(values), YAML, folder)
    archives = {one.digest: one for one in packed.archives}

    def pieces(_attempt: str, digest: str) -> Iterator[bytes]:
        return archives[digest].pieces()

    plan = make_plan(parse_spec(packed.content, YAML))
    file = make_plan_file(plan, spec_text=packed.content.decode(), content_type=YAML, code={})
    last = [Break(0, FailureClass.INVALID_MEASUREMENT, None)] * 2  # a third one is a result
    home = folder / "home"
    with block_runner(home, pieces) as runner:
        claimed = file.claimed(0, attempt_id="att_turns", attempt_no=3, broken=last)
        return Block(runner.run(claimed, endless_lease(), BlockOutput()), home / "work" / "att_turns")


class Span(NamedTuple):
    """A slice, or a loop of a program beside its steps, by the machine's clock."""

    began: float
    ended: float
    arm: str


class Block(NamedTuple):
    """A block that ran."""

    receipts: Sequence[Receipt]
    folder: Path

    def of(self, arm: str) -> Receipt:
        """Return the receipt of an arm."""
        return next(receipt for receipt in self.receipts if receipt.arm == arm)

    def slices(self, size: int) -> list[Span]:
        """Return the slices of all trials, in the order of their begins, from the steps alone."""
        spans = []
        for receipt in self.receipts:
            start = receipt.training_began_s or math.nan
            timed = [step for step in receipt.steps if step.phase == "timed"]
            for first, last in zip(timed[::size], timed[size - 1 :: size], strict=False):
                spans.append(Span(start + (first.began_s or 0.0), start + last.ended_s, receipt.arm))
        return sorted(spans)

    def ticks(self, arm: str, who: str) -> list[Span]:
        """Return when a helper of an arm ran."""
        lines = (self.folder / self.of(arm).ids.trial_id / "out" / who).read_text().splitlines()
        return [Span(*map(float, line.split()), arm) for line in lines if line.count(" ") == 1]


def test_try(tmp_path):
    block = in_a_block(tmp_path, {"baseline": (), "slow": ("--work", "0.004")}, timed=12, slice=3)
    for r in block.receipts:
        print(r.arm, r.outcome, r.message, r.waited_s, r.process_s, r.cpu_s, r.cpu_step_s, r.training_s, r.wall_s, r.environment.foreign_load)
    print(block.slices(3))
    print(list(slice_problems(block.receipts)), [receipt_check.verify(json.loads(r.model_dump_json())) for r in block.receipts])
    assert 0
