"""The expected cost of a design, from earlier trials of its arms, and the check against its budget."""

from sqlalchemy import Connection

from ablate.experiments.analysis.sizing import budget_problems
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError
from ablate.experiments.reporting import wording
from ablate.service.store.ablations.ablations import mean_trial_s
from ablate.service.store.nodes.calibrations import read_sizing


def expected_device_minutes(connection: Connection, plan: Plan) -> float | None:
    """Return the device minutes that `plan` should take; None if an arm has no earlier trial on its node class."""
    seconds = mean_trial_s(connection, [arm.digest for arm in plan.arms], plan.node_class)
    if any(arm.digest not in seconds for arm in plan.arms):
        return None
    return sum(seconds[arm.digest] for arm in plan.arms) * len(plan.blocks) * plan.busy_devices / 60


def warnings_of(spec: AblationSpec, minutes: float | None) -> list[str]:
    """Return a warning if the expected device `minutes` are over the budget; the ablation may run all the same."""
    allowed = spec.limits.device_minutes
    if minutes is None or minutes <= allowed:
        return []
    cost, budget = wording.fixed(minutes, 1), wording.number(allowed)
    return [
        f"about {cost} device minutes are expected, and limits.device_minutes allows {budget}: blocks that still wait "
        "when they are used up are cancelled, and the verdict misses their data"
    ]


def check_budget(connection: Connection, spec: AblationSpec, plan: Plan) -> None:
    """Raise SpecError if the noise decided the number of blocks and they take more than the budget."""
    problems = budget_problems(spec, read_sizing(connection, spec, plan), expected_device_minutes(connection, plan))
    if problems:
        raise SpecError(problems)
