"""Compile all problems that the lane allows for sm_90a without a GPU: everything allowed must compile.

The problems are every (N, P, R) at every chunk size, with defaults and with each switch and kind of input changed
alone. The seed decides the order, and --count takes the first ones. Usage:
python -m tests.kernels.fuzz.compiling [--count N] [--seed N] [--jobs N] [--only LINE]
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from random import Random
from typing import Any

from tests.kernels.fuzz import answers, planning
from tests.kernels.fuzz.draws import SWITCHES
from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ALLOWED, ScanProblem, parsed
from tests.kernels.fuzz.workers import Compiled, FuzzPool

BASE: dict[str, Any] = {"B": 2, "S": 700, "H": 4, "G": 2}
"""Sizes that affect no layout, with two super-chunks and a remainder."""
INPUTS: tuple[dict[str, Any], ...] = (
    {}, {"full_rotary": True}, {"cumulated": True}, {"shared_angles": True}, {"without": ("z", "zeta")},
    {"without": ("phi",)}, {"without": ("z", "zeta", "phi")}, {"S": 2}, {"H": 1, "G": 1}, {"started": True},
)  # fmt: skip
PAIRS: tuple[dict[str, Any], ...] = (
    {"layout_2d": False, "tma": False}, {"layout_2d": False, "aggressive_smem_merge": True},
    {"psiv_cache": True, "pipeline_stages": 2}, {"schedule": "sequential", "psiv_cache": True},
    {"tma": False, "pipeline_stages": 0}, {"tma": False, "pipeline_stages": 2},
)  # fmt: skip
"""Switches that affect the same kernel's layout."""


def every() -> Iterator[ScanProblem]:
    """Yield all problems of the enumeration."""
    values: dict[str, tuple[Any, ...]] = {
        "schedule": ALLOWED["schedule"], "pipeline_stages": ALLOWED["pipeline_stages"], "superchunk": (64, 1024),
        "heads_in_turn": (),
    }  # fmt: skip
    # heads_in_turn is an argument of the launch
    flips: list[dict[str, Any]] = [{}]
    for name, default in SWITCHES.items():
        if name != "chunk_size":
            others = (not default,) if isinstance(default, bool) else values[name]
            flips += [{name: value} for value in others if value != default]
    for N, P, R, chunk in product(*(ALLOWED[name] for name in ("N", "P", "R", "chunk_size"))):
        sizes = BASE | {"N": N, "P": P, "R": R}
        for flip in (*flips, *PAIRS):
            yield ScanProblem(**sizes, switches={"chunk_size": chunk} | flip)
        for change in INPUTS[1:]:
            yield ScanProblem(**sizes | change, switches={"chunk_size": chunk})


def main() -> int:
    """Compile the problems; print failures with the command that repeats them, and return 1 if there are any."""
    parser = argparse.ArgumentParser(prog="fuzz-compile", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=None, help="allowed problems of the enumeration; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--only", type=parsed, metavar="LINE", help="compile only this problem, in this process")
    arguments = parser.parse_args()
    problems = [arguments.only] if arguments.only else list(every())
    Random(arguments.seed).shuffle(problems)  # noqa: S311
    if arguments.only:
        sys.stdout.write(f"{planning.refusal(arguments.only) or planning.compiled(arguments.only)}\n")
        return 0
    allowed = [problem for problem in problems if planning.refusal(problem) is None]
    sys.stderr.write(f"{len(problems)} problems, {len(problems) - len(allowed)} refused\n")
    return _compiled(allowed[: arguments.count], arguments.jobs)


def _compiled(problems: list[ScanProblem], jobs: int) -> int:
    endings: Counter[str] = Counter()
    kernels = 0
    with FuzzPool(answers.compile_only, jobs) as pool:
        for event in pool.outcomes((problem,) for problem in problems):
            if isinstance(event, Compiled):
                kernels += event.new
            if not isinstance(event, FuzzOutcome):
                continue
            endings[event.ending] += 1
            if event.ending != "right":
                line = f"python -m tests.kernels.fuzz.compiling --only '{event.problem.line}'"
                sys.stdout.write(f"{event.ending}: {' '.join(event.why.split())}\n  {line}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{endings['right']} of {len(problems)} compile ({kernels} kernels new)\n")
    return int(endings["right"] < len(problems))


if __name__ == "__main__":
    sys.exit(main())
