"""`python -m tests.golden.freeze_plans`: store the plans of all catalog specs again, after an intended change."""

import json
from pathlib import Path
from typing import Any

from ablate.experiments.catalog.files import catalog_names
from ablate.experiments.design.plan import make_plan, questions
from ablate.experiments.errors import SpecError
from tests.factories import catalog_spec

GOLDEN = Path(__file__).with_name("plans.json")


def plans() -> dict[str, Any]:
    """Return arms and questions by digest and the blocks of each catalog spec, or its problems."""
    frozen: dict[str, Any] = {}
    for name in catalog_names():
        spec = catalog_spec(name)
        try:
            plan = make_plan(spec)
        except SpecError as error:
            frozen[name] = {"refused": [f"{problem.pointer}: {problem.detail}" for problem in error.problems]}
            continue
        frozen[name] = {
            "arms": {arm.name: arm.digest for arm in plan.arms},
            "questions": questions(spec, plan),
            "blocks": [[block.seed, *block.order] for block in plan.blocks],
        }
    return frozen


def text() -> str:
    """Return the golden file: one plan per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(plan)}" for name, plan in plans().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    GOLDEN.write_text(text(), encoding="utf-8")
