"""Run random problems on the cuda lane of this machine's GPU. Each must be right or refused beforehand.

Usage: python -m tests.kernels.fuzz [--count N] [--seed N] [--seconds N] [--jobs N] [--out DIR] | --only LINE
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.kernels.fuzz import answers, command, results, trial
from tests.kernels.fuzz.draws import DrawLimits


def main() -> int:
    """Run the requested problems; return 1 if one is not right, 2 without a GPU."""
    day = datetime.now(UTC).date().isoformat()
    arguments = command.parser("fuzz", __doc__, count=1000, out=Path("docs/receipts") / f"{day}-fuzz").parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write(
            "fuzz: this machine has no GPU that torch can use; needed: an H100 or H200. Without one: make fuzz\n"
        )
        return 2
    if arguments.only is not None:
        outcome = trial.run(arguments.only)
        sys.stdout.write(outcome.model_dump_json(indent=1) + "\n")
        return int(outcome.ending not in results.GOOD)
    return command.run(
        arguments, answers.run, DrawLimits(), f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    )


if __name__ == "__main__":
    sys.exit(main())
