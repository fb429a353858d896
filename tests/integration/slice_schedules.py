"""Run random schedules in slices, with trainers that only log when they run, and compare with an oracle.

A trainer may end early: by itself, by a signal, while it waits, or by its timeout. The oracle is the list of slices in
their expected order, written without the worker's code.
"""

import json
import math
import os
import random
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from ablate.workers.blocks.slices import SlicedBlock, SlicedTrial
from ablate.workers.lease import Lease, StopReason, boot_time_s
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.forkserver import ForkServer
from ablate.workers.processes.guardian import Guardian
from ablate.workers.processes.runner import Ending, TrialRunner
from ablate.workers.processes.wake_event import WakeEvent
from ablate.workers.trials.result import TrialOrder
from ablate.workers.trials.turns import yield_to_others

HOWS = ("returns", "exits", "is killed", "hangs")
TIMEOUT_S = 4.0
"""Of a trial that will hang; the others of its block have 60 s."""


def trainer(order: TrialOrder) -> None:
    """Log begin and end of every part; end in part `dies_in`, counted from 0 for the start-up, in the way `how`."""
    os.setsid()
    with order.paths.log.open("a", buffering=1) as log:
        for part in range(order.config["slices"] + 2):
            if part:
                yield_to_others(order.slice_pipe)
            log.write(f"+ {time.monotonic()}\n")
            if part == order.config["dies_in"]:
                _die(order.config["how"])
                return
            time.sleep(0.001)
            log.write(f"- {time.monotonic()}\n")


def _die(how: str) -> None:
    if how == "exits":
        os._exit(3)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(15 * TIMEOUT_S)


def draw(chance: random.Random) -> tuple[int, list[dict[str, Any]]]:
    """Return a number of slices and the behaviour of each trial."""
    slices = 2 * chance.randint(1, 3)
    dies = [chance.choice([None, None, chance.randint(0, slices + 1)]) for _ in range(chance.randint(1, 4))]
    return slices, [{"slices": slices, "dies_in": part, "how": chance.choices(HOWS, (9, 9, 9, 1))[0]} for part in dies]


HANGS = [
    {"slices": 4, "dies_in": None, "how": "returns"},
    {"slices": 4, "dies_in": 2, "how": "hangs"},
    {"slices": 4, "dies_in": 0, "how": "exits"},
]
"""The first block in every run."""


def expected(slices: int, trials: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return (trial, part) in the expected order."""
    line = [(number, 0) for number in range(len(trials))]
    for part in range(1, slices + 1):
        there = list(range(len(trials)))
        line += [(number, part) for number in (there if part % 2 else there[::-1])]
    line += [(number, slices + 1) for number in range(len(trials))]
    return [(n, part) for n, part in line if trials[n]["dies_in"] is None or part <= trials[n]["dies_in"]]


def ran(runner: TrialRunner, home: Path, slices: int, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Run a block; return the order of its parts, their overlaps, and the endings of the trials."""
    paths = [WorkPaths(home=home).trial("att", f"trl_{home.name}_{number}") for number in range(len(trials))]
    endings: dict[int, Ending] = {}
    lives: list[int] = []
    sliced = [
        SlicedTrial(
            order=TrialOrder(
                trial_id=paths[number].folder.name, config=trial, paths=paths[number], data_dir=home, device_type="cpu"
            ),
            timeout_s=TIMEOUT_S if trial["how"] == "hangs" and trial["dies_in"] is not None else 60.0,
            began=lambda: None,
            goes_on=lambda number=number: lives.append(number),  # type: ignore[misc]
            ended=lambda ending, number=number: endings.update({number: ending}),  # type: ignore[misc]
        )
        for number, trial in enumerate(trials)
    ]
    began = time.monotonic()
    SlicedBlock(runner, Lease(math.inf, sent_at=boot_time_s())).run(sliced, slices=slices)
    elapsed_s = time.monotonic() - began
    spans = sorted(span for number, path in enumerate(paths) for span in _spans(number, path.log.read_text()))
    overlaps = sum(later[0] < earlier[1] for earlier, later in pairwise(spans))
    return {
        "line": [(number, part) for _began, _ended, number, part in spans],
        "turns": [(number, lives[:place].count(number)) for place, number in enumerate(lives)],
        "overlaps": overlaps,
        "stopped": [endings[number].stopped for number in range(len(trials))],
        "spent": sum(ending.wall_s for ending in endings.values()) <= elapsed_s,
        "codes": [endings[number].exit_code for number in range(len(trials))],
    }


def _spans(number: int, text: str) -> list[tuple[float, float, int, int]]:
    begins = [float(line[2:]) for line in text.splitlines() if line.startswith("+")]
    ends = [float(line[2:]) for line in text.splitlines() if line.startswith("-")]
    ends += begins[len(ends) :]
    return [(began, ended, number, part) for part, (began, ended) in enumerate(zip(begins, ends, strict=True))]


def problems(slices: int, trials: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    """Compare with the oracle."""
    line = expected(slices, trials)
    hung = [trial["how"] == "hangs" and trial["dies_in"] is not None for trial in trials]
    stopped = [StopReason.TIMEOUT if one else None for one in hung]
    wrong = [name for name in ("line", "turns") if result[name] != line]
    wrong += [name for name, good in (("overlaps", not result["overlaps"]), ("spent", result["spent"])) if not good]
    wrong += ["stopped"] if result["stopped"] != stopped else []
    codes = {"returns": 0, "exits": 3, "is killed": -signal.SIGKILL, "hangs": -signal.SIGTERM}
    expected_codes = [codes[trial["how"]] if trial["dies_in"] is not None else 0 for trial in trials]
    return wrong + (["codes"] if result["codes"] != expected_codes else [])


def main() -> None:
    """Print the blocks with unexpected results as JSON."""
    home, draws = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(20261123)  # noqa: S311 - reproducible by design
    with Guardian() as guardian:
        server = ForkServer(preload="ablate.workers.blocks.slices", target=trainer)
        runner = TrialRunner(server, guardian, WakeEvent(), grace_s=5.0, preempted=lambda: False)
        wrong, seen = [], set()
        for number in range(draws):
            slices, trials = draw(chance) if number else (4, HANGS)
            seen |= {(trial["how"], trial["dies_in"] is not None) for trial in trials}
            result = ran(runner, home / str(number), slices, trials)
            if what := problems(slices, trials, result):
                wrong.append({"draw": number, "wrong": what, "slices": slices, "trials": trials, "found": result})
    sys.stdout.write(json.dumps({"wrong": wrong, "seen": sorted(seen)}, default=str))


if __name__ == "__main__":
    main()
