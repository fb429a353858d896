"""Bisect drawn git histories of a small trainer by `ablate bisect`, and by `git bisect run` with repeats.

Usage: python -m tests.bench.histories FOLDER [--count 60] [--start 0] [--seed 1]

Each history has 8 to 64 commits: comments, others that change only the luck of the trainer, one in ten that breaks it,
and one that makes its counted work, its loss or its peak of memory 2, 5 or 10 % larger. A real stack with a worker runs
every trial in a fresh process. The plain way runs each commit that git asks about six times, one for each seed, and
compares the mean with the middle of the good and the bad commit. FOLDER/histories.jsonl gets a line for each history.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tests.acceptance.test_stack import Home

SEEDS = range(1, 7)
METRICS, STEPS_PCT = ("work", "val_loss", "peak_bytes"), (2, 5, 10)
SPEC = """
ablation: any
question: Which commit made {metric} larger?
workload:
  command: [python, train.py, "{{seed}}"]
  code: code
  metrics: {{{metric}: {{better: lower}}}}
design: {{seeds: [1, 2, 3, 4, 5, 6], blocks: {{count: 6}}}}
placement: {{node_class: cpu, max_foreign_load: 99%}}
verdict: {{primary: {{metric: {metric}, margin: 0.5%}}}}
"""
PROGRAM = """\"\"\"A small trainer: a network with one hidden layer learns a noisy teacher.\"\"\"

import sys
import tracemalloc

import numpy as np

LUCK, LR, STEPS, KEPT = {luck}, {lr!r}, {steps}, {kept}
{comments}
tracemalloc.start()
rng = np.random.default_rng([int(sys.argv[1]), LUCK])
kept = np.ones(KEPT)  # as an optimiser keeps state
x = np.random.default_rng(1).normal(size=(1024, 8))
y = np.tanh(x @ np.random.default_rng(0).normal(size=8)) + 0.3 * np.random.default_rng(2).normal(size=1024)
weights = np.random.default_rng(3)
first, second, work = weights.normal(size=(8, 16)) / 3, weights.normal(size=16) / 4, 0
for _ in range(STEPS):
    rows = rng.integers(len(x), size=64)
    hidden = np.tanh(x[rows] @ first)
    wrong = hidden @ second - y[rows]
    back = np.outer(wrong, second) * (1 - hidden**2)
    first -= LR * x[rows].T @ back / 64
    second -= LR * hidden.T @ wrong / 64
    work += 3 * x[rows].size * 16
print(f"METRIC work={{work}}")
print(f"METRIC val_loss={{np.mean((np.tanh(x @ first) @ second - y) ** 2)}}")
print(f"METRIC peak_bytes={{tracemalloc.get_traced_memory()[1]}}")
"""


@dataclass(frozen=True)
class Trainer:
    """One commit of the trainer."""

    luck: int = 0
    lr: float = 0.1
    steps: int = 200
    kept: int = 100_000
    comments: tuple[str, ...] = ()
    is_broken: bool = False

    def text(self) -> str:
        """Return its program."""
        if self.is_broken:
            return "raise SystemExit('broken')\n"
        return PROGRAM.format(**{**asdict(self), "comments": "\n".join(self.comments)})


def ran(file: Path, metric: str, seed: int) -> float:
    """Run a program; return a metric that it prints."""
    done = subprocess.run([sys.executable, file, str(seed)], capture_output=True, text=True, check=True)
    return float(next(line for line in done.stdout.splitlines() if f" {metric}=" in line).partition("=")[2])


def planted(trainer: Trainer, metric: str, percent: float) -> Trainer:
    """Return the trainer with so many percent more of a metric."""
    if metric == "work":
        return replace(trainer, steps=round(trainer.steps * (1 + percent / 100)))
    if metric == "peak_bytes":
        return replace(trainer, kept=round(trainer.kept + percent / 100 * _measured("peak_bytes", 0.1) / 8))
    return replace(trainer, lr=_rate(percent))


@cache
def _rate(percent: float) -> float:
    """Return the smaller learning rate that leaves so many percent more loss, in the mean over the seeds."""
    target, small, large = _measured("val_loss", 0.1) * (1 + percent / 100), 0.03, 0.1
    for _ in range(10):
        middle = (small + large) / 2
        small, large = (middle, large) if _measured("val_loss", middle) > target else (small, middle)
    return round(large, 5)


@cache
def _measured(metric: str, rate: float) -> float:
    """Return the mean of a metric of the first trainer with another learning rate."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "train.py")
        file.write_text(Trainer(lr=rate).text())
        return fmean(ran(file, metric, seed) for seed in SEEDS)


def draw_history(rng: random.Random, metric: str, percent: float) -> tuple[list[Trainer], int]:
    """Return the trainer at each commit, the oldest first, and the place of the one that made the difference."""
    length = rng.choice((8, 16, 32, 64))
    culprit = rng.randint(1, length)
    trainers = [Trainer()]
    for place in range(1, length + 1):
        last = next(trainer for trainer in reversed(trainers) if not trainer.is_broken)
        if place == culprit:
            trainers.append(planted(last, metric, percent))
        elif place not in (1, length, culprit - 1, culprit + 1) and rng.random() < 0.1:
            trainers.append(replace(last, is_broken=True))
        elif rng.random() < 0.5:
            trainers.append(replace(last, luck=last.luck + 1))
        else:
            trainers.append(replace(last, comments=(*last.comments[-3:], f"# {rng.getrandbits(40):x}")))
    return trainers, culprit


def write_history(lab: Path, trainers: Sequence[Trainer], metric: str) -> list[str]:
    """Make the repository; return the names of its commits."""
    (lab / "code").mkdir(parents=True)
    (lab / "spec.yaml").write_text(SPEC.format(metric=metric))
    git(lab, "init", "-q", "-b", "main", ".")
    names = []
    for place, trainer in enumerate(trainers):
        (lab / "code" / "train.py").write_text(trainer.text())
        git(lab, "add", ".")
        git(lab, "commit", "-qm", f"Change {place}", "--allow-empty")
        names.append(git(lab, "rev-parse", "HEAD"))
    return names


def git(folder: Path, *arguments: str) -> str:
    """Return the output of git."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def plain(lab: Path, commits: Sequence[str], metric: str) -> tuple[str | None, int]:
    """Return the commit that `git bisect run` names, and the trials that it ran."""
    clone, log = lab / "plain", lab / "plain.log"
    git(lab, "clone", "-q", ".", str(clone))
    ends = []
    for commit in (commits[0], commits[-1]):
        git(clone, "checkout", "-q", commit)
        ends.append(fmean(ran(clone / "code" / "train.py", metric, seed) for seed in SEEDS))
    script = lab / "judge.py"
    script.write_text(
        "import statistics, subprocess, sys\n"
        "values = []\n"
        f"for seed in {list(SEEDS)}:\n"
        f"    open({str(log)!r}, 'a').write('trial\\n')\n"
        "    done = subprocess.run([sys.executable, 'code/train.py', str(seed)], capture_output=True, text=True)\n"
        "    if done.returncode: sys.exit(125)\n"
        f"    values += [float(line.split('=')[1]) for line in done.stdout.splitlines() if ' {metric}=' in line]\n"
        f"sys.exit(int(statistics.fmean(values) > {fmean(ends)}))\n"
    )
    log.write_text("")
    git(clone, "bisect", "start", commits[-1], commits[0])
    git(clone, "bisect", "run", sys.executable, str(script))
    named = git(clone, "rev-parse", "refs/bisect/bad")
    return named, len(log.read_text().splitlines()) + 2 * len(SEEDS)


def one(home: Home, folder: Path, number: int, seed: int) -> dict[str, Any]:
    """Draw, write and bisect one history in both ways."""
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - a seeded draw
    metric, percent = METRICS[number % 3], STEPS_PCT[number // 3 % 3]
    lab = folder / f"history-{number}"
    lab.mkdir(parents=True)
    trainers, culprit = draw_history(rng, metric, percent)
    names = write_history(lab, trainers, metric)
    home.current, began = lab, time.monotonic()
    before = trials(home)
    done = home.run("bisect", "spec.yaml", "--good", names[0], "--json")
    answer = json.loads(done.stdout.splitlines()[-1])["bisection"] if done.returncode == 0 else None
    took_s, count = time.monotonic() - began, trials(home) - before
    named, plain_count = plain(lab, names, metric)
    return {
        "history": number,
        "metric": metric,
        "percent": percent,
        "commits": len(names) - 1,
        "broken": sum(trainer.is_broken for trainer in trainers),
        "culprits": None if answer is None else len(answer["culprits"]),
        "right": answer is not None and names[culprit] in answer["culprits"],
        "why_not": None if answer is not None else (done.stderr + done.stdout)[-300:],
        "trials": count,
        "plain_right": named == names[culprit],
        "plain_trials": plain_count,
        "took_s": round(took_s, 1),
    }


def trials(home: Home) -> int:
    """Return the number of trials of all ablations of the service."""
    listed = json.loads(home.run("list", "--json", "--limit", "5000").stdout)
    return sum(ablation["trials"]["done"] for ablation in listed)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how often each way was right, and its trials."""
    answered = [row for row in rows if row["culprits"]]
    return {
        "histories": len(rows),
        "right": sum(row["right"] for row in rows),
        "one_commit_named": sum(row["culprits"] == 1 for row in answered),
        "wrong": sum(not row["right"] for row in answered),
        "no_answer": len(rows) - len(answered),
        "median_trials": median(row["trials"] for row in rows),
        "most_trials": max(row["trials"] for row in rows),
        "plain_right": sum(row["plain_right"] for row in rows),
        "plain_median_trials": median(row["plain_trials"] for row in rows),
        "plain_most_trials": max(row["plain_trials"] for row in rows),
    }


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the histories and print the summaries, that of each kind first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(None if arguments is None else list(arguments))
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    home, table = Home(folder / "home"), folder / "histories.jsonl"
    home.up()
    try:
        for number in range(options.start, options.count):
            row = one(home, folder, number, options.seed)
            with table.open("a") as file:
                file.write(json.dumps(row) + "\n")
    finally:
        home.run("down")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    for metric in METRICS:
        for percent in STEPS_PCT:
            own = [row for row in rows if (row["metric"], row["percent"]) == (metric, percent)]
            if own:
                print(json.dumps({"metric": metric, "percent": percent, **summary(own)}))  # noqa: T201
    print(json.dumps(summary(rows)))  # noqa: T201


if __name__ == "__main__":
    main()
