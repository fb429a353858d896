"""Questions: what a variant asks, so that asking the same again is seen whatever the spec looks like.

A question is one variant against its baseline: the gates of both, the workload, the metric that decides and the node
class. Names, seeds, numbers of blocks and steps, margins, limits and labels belong to an answer, not to the question.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from experiments.design.arms import Arm
from experiments.design.fields import read_field
from experiments.design.gates import GATES
from experiments.design.plan import Plan
from experiments.design.recipes import OVERRIDES, RECIPES
from experiments.design.spec import AblationSpec, Workload
from experiments.digest import digest


def questions(spec: AblationSpec, plan: Plan) -> dict[str, str]:
    """Return the digest of what every variant asks, by its name. A variant that repeats the baseline asks nothing."""
    asked = {
        "recipe": spec.workload.recipe,
        "overrides": _overrides(spec.workload),
        "baseline": _gates(plan.baseline),
        "metric": spec.verdict.primary.metric,
        "node_class": plan.node_class,
        "devices": plan.devices,
    }
    return {
        arm.name: digest({**asked, "variant": _gates(arm)})
        for arm in plan.arms[1:]
        if arm.digest != plan.baseline.digest
    }


def question_digest(asked: Iterable[str]) -> str | None:
    """Return the digest of what an ablation asks: what its variants ask, in no order. None for nothing."""
    found = sorted(set(asked))
    return digest(found) if found else None


def _gates(arm: Arm) -> dict[str, Any]:
    """Return the gates that are not at their default: a gate that is added later changes no question."""
    return {name: value for name, value in arm.gates.items() if value != GATES[name].default}


def _overrides(workload: Workload) -> Mapping[str, Any]:
    """Return the overrides that change the recipe."""
    recipe = RECIPES[workload.recipe].config
    return {key: value for key, value in workload.overrides.items() if value != read_field(recipe, OVERRIDES[key].path)}
