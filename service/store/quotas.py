"""Device minutes that the ablations of a token have used: of finished, broken and running attempts."""

from collections.abc import Mapping, Sequence

from sqlalchemy import ColumnElement, Connection, func, select

from service.errors import QuotaUsedUp
from service.principals import Principal
from service.store.columns import db_now
from service.store.tables import ablations, attempts, blocks

_USED_S: ColumnElement[float] = func.sum(func.coalesce(attempts.c.ended_at, db_now()) - attempts.c.started_at)
_S_PER_MINUTE = 60.0


def used_minutes(connection: Connection, token_ids: Sequence[str]) -> Mapping[str, float]:
    """Return the device minutes that the ablations of tokens have used until now, by token id."""
    query = (
        select(ablations.c.token_id, _USED_S)
        .join(blocks, blocks.c.ablation_id == ablations.c.id)
        .join(attempts, attempts.c.block_id == blocks.c.id)
        .where(ablations.c.token_id.in_(token_ids))
        .group_by(ablations.c.token_id)
    )
    return {row[0]: float(row[1]) / _S_PER_MINUTE for row in connection.execute(query)}


def check_quota(connection: Connection, principal: Principal) -> None:
    """Raise QuotaUsedUp when the token's ablations have used its device minutes up."""
    if principal.device_minutes is None:
        return
    used = used_minutes(connection, [principal.token_id]).get(principal.token_id, 0.0)
    if used >= principal.device_minutes:
        raise QuotaUsedUp(
            f"the ablations of token '{principal.name}' have used {used:.1f} of its {principal.device_minutes:g} "
            "device minutes; an administrator may change the quota: ablate tokens quota"
        )
