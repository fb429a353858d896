"""What a design is expected to cost, from earlier trials of its arms, and whether one that was sized can pay it."""

from collections.abc import Mapping

from sqlalchemy import Connection

from experiments.analysis.sizing import budget_problems
from experiments.design.plan import Plan
from experiments.design.spec import AblationSpec
from experiments.errors import SpecError
from experiments.reporting import wording
from service.store.ablations.ablations import mean_trial_s
from service.store.nodes.calibrations import read_sizing


def expected_device_minutes(connection: Connection, plan: Plan) -> float | None:
    """Return what `device_minutes` makes of what is known now."""
    return device_minutes(plan, mean_trial_s(connection, [arm.digest for arm in plan.arms], plan.node_class))


def device_minutes(plan: Plan, seconds: Mapping[str, float]) -> float | None:
    """Return the device minutes that `plan` takes if its arms' trials take these seconds; None without those of all."""
    known = [seconds[arm.digest] for arm in plan.arms if arm.digest in seconds]
    if len(known) < len(plan.arms):
        return None
    return sum(known) * len(plan.blocks) * plan.busy_devices / 60


def warnings_of(spec: AblationSpec, minutes: float | None) -> list[str]:
    """Return what whoever plans or submits `spec` is told, although it may run: that `minutes` are over its budget."""
    allowed = spec.limits.device_minutes
    if minutes is None or minutes <= allowed:
        return []
    cost, budget = wording.fixed(minutes, 1), wording.number(allowed)
    return [
        f"about {cost} device minutes are expected, and limits.device_minutes allows {budget}: blocks that still wait "
        "when they are used up are cancelled, and the verdict misses their data"
    ]


def check_budget(connection: Connection, spec: AblationSpec, plan: Plan) -> None:
    """Refuse a number of blocks that was asked for by the noise and takes more than is allowed. Raises SpecError."""
    problems = budget_problems(spec, read_sizing(connection, spec, plan), expected_device_minutes(connection, plan))
    if problems:
        raise SpecError(problems)
