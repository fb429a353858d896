"""A kind of workload that the product does not know: a plan, its trials in real processes, and the verdict.

`python -m tests.integration.fourth_kind HOME` prints decision and effect as JSON.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablate.experiments.analysis.judge import judge
from ablate.experiments.design import arms
from ablate.experiments.design.gate import Claim, Facts
from ablate.experiments.design.kinds.gate_readings import GateReading, declared_readings
from ablate.experiments.design.kinds.kind import Draft, Drafts
from ablate.experiments.design.kinds.program import ProgramArm, shared_fields
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.workload import Workload
from ablate.experiments.outcomes import BASELINE
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.plan_file import make_plan_file, plan_file_text, read_plan_file
from ablate.workers.processes.trial_output import BlockOutput
from tests.factories import command_values
from tests.integration.block_runners import block_runner, endless_lease

PROGRAM = """
import ablate, sys
with ablate.trial(seed=int(sys.argv[2])) as trial:
    for step in trial.steps(10):
        step.report(loss=float(sys.argv[1]) * (1 + int(sys.argv[2]) / 1000), tokens=10)
"""


@dataclass(frozen=True, kw_only=True)
class BitsArm(ProgramArm):
    """A program whose loss is the first argument of its arm."""

    bits: float

    marked_by = "bits"
    attested = False

    @classmethod
    def takes(cls, workload: Workload) -> bool:
        """Return whether the command is the word for this kind."""
        return workload.command == ("bits",)

    @classmethod
    def drafts(cls, spec: AblationSpec) -> Drafts:
        """Make an arm of each number."""
        numbers = {BASELINE: spec.baseline.args, **{name: own.args or () for name, own in spec.variants.items()}}
        made = (
            Draft(
                name,
                {"bits": bits},
                cls(command=("python", "-c", PROGRAM, bits, "{seed}"), bits=float(bits), **shared_fields(spec)),
            )
            for name, (bits,) in numbers.items()
        )
        return Drafts(arms=tuple(made), problems=())

    def lane(self) -> str:
        """Return the lane of commands."""
        return "command"

    def readings(self, gates: Mapping[str, Any], _facts: Facts) -> dict[str, GateReading]:
        """Return the number as declared."""
        return declared_readings(gates)

    def shape(self) -> dict[str, Any]:
        """Return nothing: all arms are alike."""
        return {}

    def content(self) -> dict[str, Any]:
        """Return the number."""
        return {"bits": self.bits}

    def claim_of(self, _name: str) -> Claim:
        """Return the weakest claim."""
        return Claim.CHANGES_MODEL

    def describe(self) -> str:
        """Return the number."""
        return f"{self.bits} bits"


def main() -> None:
    """Print the decision and the effect."""
    home = Path(sys.argv[1])
    arms.KINDS.insert(0, BitsArm)
    values = command_values(
        workload={
            "command": ["bits"],
            "steps": {"warmup": 0, "timed": 1},
        },
        baseline={"args": ["2.0"]},
        variants={"fewer": {"args": ["1.8"]}},
        design={"seeds": [*range(1, 7)], "blocks": {"count": 6}, "order_seed": 1},
        verdict={"primary": {"metric": "loss_final", "margin": "1%"}},
    )
    text = json.dumps(values)
    spec = parse_spec(text.encode(), "application/json")
    made = make_plan_file(make_plan(spec), spec_text=text, content_type="application/json")
    file = read_plan_file(plan_file_text(made).encode())
    blocks = (file.claimed(index, attempt_id=f"att_{index}", attempt_no=1) for index in range(6))
    with block_runner(home) as runner:
        receipts = [receipt for block in blocks for receipt in runner.run(block, endless_lease(), BlockOutput())]
    (variant,) = judge(file.plan, spec, receipts, CALIBRATED).variants
    sys.stdout.write(json.dumps([variant.decision, variant.primary and variant.primary.delta_pct]))


if __name__ == "__main__":
    main()
