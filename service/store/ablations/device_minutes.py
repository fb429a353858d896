"""Device minutes: used and reserved by a token, expected of a plan, and the checks against quota and budget."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, literal, select, union_all

from ablate.experiments.analysis.sizing import budget_problems
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError
from ablate.experiments.reporting import wording
from ablate.service.errors import QuotaUsedUp
from ablate.service.lifecycle import OVER
from ablate.service.principals import Principal
from ablate.service.store.nodes.calibrations import read_sizing
from ablate.service.store.nodes.placement import BUSY_DEVICES
from ablate.service.store.tables import ablations, attempts, blocks, db_now, receipts, tokens

_NOW = case((blocks.c.lease_until < db_now(), blocks.c.lease_until), else_=db_now())
"""A running attempt uses nothing after its lease."""
_TOOK_S = func.coalesce(attempts.c.ended_at, _NOW) - attempts.c.started_at
_USED_S: ColumnElement[float] = func.sum(case((_TOOK_S > 0, _TOOK_S), else_=0.0) * BUSY_DEVICES)
"""The database's clock may have been set back since a start."""
_S_PER_MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class Minutes:
    """Device minutes of one token."""

    used: float = 0.0
    """By finished, broken and running attempts."""
    reserved: float = 0.0
    """The rest of the limits of ablations that are not over."""


def minutes_of(connection: Connection, token_ids: Sequence[str]) -> Mapping[str, Minutes]:
    """Return the device minutes of tokens, by token id; a token that never submitted has no entry."""
    own = _by_ablation(token_ids).subquery()
    left = case((and_(own.c.state.not_in(OVER), own.c.allowed > own.c.used), own.c.allowed - own.c.used), else_=0.0)
    query = select(own.c.token_id, func.sum(own.c.used), func.sum(left)).group_by(own.c.token_id)
    return {row[0]: Minutes(used=float(row[1]), reserved=float(row[2])) for row in connection.execute(query)}


def _by_ablation(token_ids: Sequence[str]) -> Select[tuple[str, str, float, float]]:
    used = func.coalesce(_USED_S, 0.0) / _S_PER_MINUTE
    return (
        select(ablations.c.token_id, ablations.c.state, ablations.c.device_minutes.label("allowed"), used.label("used"))
        .outerjoin(blocks, blocks.c.ablation_id == ablations.c.id)
        .outerjoin(attempts, attempts.c.block_id == blocks.c.id)
        .where(ablations.c.token_id.in_(token_ids))
        .group_by(ablations.c.id)
    )


def check_quota(connection: Connection, principal: Principal) -> None:
    """Raise QuotaUsedUp if the token's ablations, including the one just stored, may use more than its quota.

    Locks the token, so two concurrent submissions that fit only alone do not both pass.
    """
    if principal.device_minutes is None:
        return
    connection.execute(select(tokens.c.id).where(tokens.c.id == principal.token_id).with_for_update(key_share=True))
    check_quota_for(connection, principal, 0.0)


def check_quota_for(connection: Connection, principal: Principal, minutes_more: float) -> None:
    """Raise QuotaUsedUp if the token's ablations and one more of so many device minutes may use more than its quota."""
    if principal.device_minutes is None:
        return
    stored = minutes_of(connection, [principal.token_id]).get(principal.token_id, Minutes())
    minutes = Minutes(used=stored.used, reserved=stored.reserved + minutes_more)
    if minutes.used + minutes.reserved > principal.device_minutes:
        most = math.ceil(minutes.used + minutes.reserved)
        raise QuotaUsedUp(
            f"the ablations of token '{principal.name}' have used {minutes.used:.1f} device minutes, and those "
            f"that are not over, this one among them, may use {minutes.reserved:.1f} more; it has "
            f"{principal.device_minutes:g}. Ask for fewer limits.device_minutes, or an administrator may change the "
            f"quota: ablate admin tokens quota {principal.name} --device-minutes {most}"
        )


_WALLS_READ = 50
"""Trials of an arm whose mean time is taken, so that a submission does not read 100,000 of them."""


def expected_device_minutes(connection: Connection, plan: Plan) -> float | None:
    """Return the device minutes that `plan` should take; None if an arm has no earlier trial on its node class."""
    seconds = mean_trial_s(connection, [arm.digest for arm in plan.arms], plan.node_class)
    if any(arm.digest not in seconds for arm in plan.arms):
        return None
    return sum(seconds[arm.digest] for arm in plan.arms) * len(plan.blocks) * plan.busy_devices / 60


def mean_trial_s(connection: Connection, arm_digests: Sequence[str], node_class: str) -> dict[str, float]:
    """Return the mean wall seconds of earlier trials on `node_class` by arm digest; no entry for an arm that never ran.

    Reads at most _WALLS_READ trials of an arm, in no particular order.
    """

    def mean(digest: str) -> Select[Any]:
        ran = (receipts.c.arm_digest == digest, ablations.c.node_class == node_class)
        walls = select(receipts.c.wall_s).join(ablations, ablations.c.id == receipts.c.ablation_id).where(*ran)
        return select(literal(digest), func.avg(walls.limit(_WALLS_READ).subquery().c.wall_s))

    rows = connection.execute(union_all(*map(mean, dict.fromkeys(arm_digests))))
    return {digest: float(seconds) for digest, seconds in rows if seconds is not None}


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
