"""`make fuzz`: small problems of the GPU fuzz with interpreted kernels on a CPU.

The interpreter rounds like a GPU, so the same criterion applies.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.kernels.fuzz import command, results, trial
from tests.kernels.fuzz.draws import DrawLimits
from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ScanProblem
from tests.kernels.interpreted_lane import interpreted_lane

SMALL = DrawLimits(length=150, elements=2**16, chunks=12, share=4)


def answer(problem: ScanProblem, _report: Callable[[object], None] | None = None) -> FuzzOutcome:
    """Run the problem in the interpreter."""
    torch.set_num_threads(1)
    with interpreted_lane():
        return trial.run(problem, device="cpu")


def main() -> int:
    """Run the requested problems; return 1 if one is not right."""
    arguments = command.parser("fuzz", __doc__, count=100, out=Path("build/fuzz")).parse_args()
    if arguments.only is not None:
        outcome = answer(arguments.only)
        sys.stdout.write(outcome.model_dump_json(indent=1) + "\n")
        return int(outcome.ending not in results.GOOD)
    return command.run(arguments, answer, SMALL, f"CPU, {len(os.sched_getaffinity(0))} cores, kernels interpreted")


if __name__ == "__main__":
    sys.exit(main())
