"""Measure the noise of a pair of trials of a command beside busy processes, in one go and in turns.

Usage: python -m tests.bench.turns FOLDER [--pairs 8] [--busy 6] [--timed 96] [--slice 6] [--unmarked] [--more 0.08]

The program trains a small GPT on two threads. The variant has the fused optimiser, which works less; with --more it has
that share of further steps instead. With --unmarked the program marks no steps, and takes turns by the clock. Every
pair is a block of real trials, as a worker runs it; pairs in one go and in turns alternate. A busy process spins, or
reads and writes memory, for 3 to 20 s and rests for up to 12 s. The table has the standard deviation of
d = ln(variant / baseline) over the pairs, its mean, and how many blocks an effect of that size needs.
"""

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.power import blocks_to_detect
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.code_archive import PackedCode
from ablate.experiments.records.plan_file import make_plan_file
from ablate.experiments.records.receipts import Receipt, read_named
from ablate.experiments.records.spec_code import pack_spec
from ablate.workers.blocks.block_runner import BlockRunner
from ablate.workers.isolation.environment import wait_passively
from ablate.workers.processes.trial_output import BlockOutput
from tests.integration.block_runners import block_runner, endless_lease

YAML = "application/yaml"
PROGRAM = """
import argparse

import ablate
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--fused", action="store_true")
parser.add_argument("--steps", type=int)
options = parser.parse_args()
torch.manual_seed(options.seed)
torch.set_num_threads(2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(2))
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.mlp = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x):
        q, k, v = (t.unflatten(2, (4, 32)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).split(128, 2))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


model = nn.Sequential(nn.Embedding(65, 128), *(Block() for _ in range(4)), nn.LayerNorm(128), nn.Linear(128, 65))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options.fused)
with ablate.trial(seed=options.seed) as trial:
    for step in range(options.steps) if options.steps else trial.steps(20):
        rows = torch.randint(0, 65, (12, 65))
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not options.steps:
            step.report(loss=loss.item(), tokens=rows[:, 1:].numel())
"""
BUSY = """
import random
import time

memory = bytearray(2**25)
while True:
    end, spins = time.monotonic() + random.uniform(3, 20), random.random() < 0.5
    while time.monotonic() < end:
        sum(range(100_000)) if spins else bytes(memory)
    time.sleep(random.uniform(0, 12))
"""
NUMBERS = {
    "step_s": "time of the window",
    "cpu_step_s": "its processor time",
    "process_s": "time of the whole process",
    "cpu_s": "its processor time",
}


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Let processes work without end."""
    spinning = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def values_of(options: argparse.Namespace, *, in_turns: bool) -> dict[str, Any]:
    """Return the values of the spec."""
    workload: dict[str, Any] = {"command": ["python", "train.py", "--seed", "{seed}"], "code": "code"}
    if options.unmarked:
        workload |= {"command": [*workload["command"], "--steps"], **({"turns": True} if in_turns else {})}
    else:
        workload["steps"] = {"warmup": 3, "timed": options.timed, "slice": options.slice if in_turns else 0}
    steps = [str(options.timed)] if options.unmarked else []
    more = [str(round(options.timed * (1 + options.more)))] if options.more is not None else [*steps, "--fused"]
    return {
        "ablation": "turns",
        "question": "How much do pairs of trials scatter?",
        "workload": workload,
        "baseline": {"args": steps},
        "variants": {"variant": {"args": more}},
        "design": {"seeds": [1], "blocks": {"count": 200}},
        "placement": {"node_class": "cpu", "max_foreign_load": "99%"},
        "verdict": {"primary": {"metric": "cpu_s" if options.unmarked else "step_s", "margin": "1%"}},
    }


class Pairs:
    """Blocks of one spec."""

    def __init__(
        self, folder: Path, name: str, archives: dict[str, PackedCode], values: dict[str, Any], numbers: Sequence[str]
    ) -> None:
        folder.joinpath("code").mkdir(parents=True, exist_ok=True)
        folder.joinpath("code/train.py").write_text(PROGRAM, encoding="utf-8")
        packed = pack_spec(spec_yaml(values), YAML, folder)
        archives.update({one.digest: one for one in packed.archives})
        plan = make_plan(parse_spec(packed.content, YAML))
        self._file = make_plan_file(plan, spec_text=packed.content.decode(), content_type=YAML, code={})
        self._name = name
        self.loads: list[float] = []
        self.differences: dict[str, list[float]] = {name: [] for name in numbers}
        self.took_s = 0.0

    def run(self, runner: BlockRunner, number: int) -> None:
        """Run one block; keep what its trials differ by."""
        began = time.monotonic()
        claimed = self._file.claimed(number, attempt_id=f"att_{self._name}{number}", attempt_no=1, broken=())
        receipts = runner.run(claimed, endless_lease(), BlockOutput())
        base, own = sorted(receipts, key=lambda receipt: receipt.arm)
        for receipt in (base, own):
            if receipt.outcome is not Outcome.MEASURED:
                raise SystemExit(f"{receipt.arm}: {receipt.message}")
            self.loads.append(receipt.environment.foreign_load or 0.0)
        self.took_s += time.monotonic() - began
        for name, differences in self.differences.items():
            differences.append(math.log(_read(name, own) / _read(name, base)))


def _read(name: str, receipt: Receipt) -> float:
    return read_named(name, receipt) or math.nan


def _row(name: str, every: Sequence[Pairs]) -> str:
    cells = [f"{NUMBERS[name]} (`{name}`)"]
    for differences in (pairs.differences[name] for pairs in every):
        sd, mean = statistics.stdev(differences), statistics.fmean(differences)
        needed = blocks_to_detect(abs(mean), sd, minimum=MIN_BLOCKS)
        cells.append(f"{sd:.2%} | {math.expm1(mean):+.2%} | {needed or 'more'}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--busy", type=int, default=6)
    parser.add_argument("--timed", type=int, default=96)
    parser.add_argument("--slice", type=int, default=6)
    parser.add_argument("--unmarked", action="store_true")
    parser.add_argument("--more", type=float)
    options = parser.parse_args()
    if options.more is not None and not options.unmarked:
        parser.error("--more counts the steps of a program without marks: add --unmarked")
    archives: dict[str, PackedCode] = {}
    wait_passively()  # as a worker does

    def pieces(_attempt: str, digest: str) -> Iterator[bytes]:
        return archives[digest].pieces()

    numbers = ("process_s", "cpu_s") if options.unmarked else tuple(NUMBERS)
    every = [
        Pairs(options.folder / name, name, archives, values_of(options, in_turns=in_turns), numbers)
        for name, in_turns in (("whole", False), ("turns", True))
    ]
    with busy_processes(options.busy), block_runner(options.folder / "home", pieces) as runner:
        for number, pairs in itertools.product(range(options.pairs), every):
            pairs.run(runner, number)
            _say(f"{number} { ({name: f'{own[-1]:+.2%}' for name, own in pairs.differences.items()}) }")
    loads = [f"{statistics.fmean(pairs.loads):.0%}" for pairs in every]
    _say(f"{options.pairs} pairs, {options.busy} busy processes, {len(os.sched_getaffinity(0))} cores; others took")
    took = [f"{pairs.took_s / options.pairs:.0f} s" for pairs in every]
    _say(f"{' and '.join(loads)} of the cores' time, and a pair took {' and '.join(took)} (in one go, in turns)")
    _say("| number of a pair | in one go: sd | mean | blocks | in turns: sd | mean | blocks |")
    _say("|---|---|---|---|---|---|---|")
    for name in numbers:
        _say(_row(name, every))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
