"""What MLflow has to show next, and which projector writes it: one at a time for an ablation, any number in all.

Rows of the outbox that ask for the same ablation are answered together: whatever is there when somebody begins is
seen by what he reads afterwards, and what comes later is a row that he leaves.
"""

from sqlalchemy import Connection, func, select, update

from service.lifecycle import OutboxKind
from service.store import outbox
from service.store.columns import db_now
from service.store.tables import leaders
from service.store.tables import outbox as rows

KINDS = (OutboxKind.PROJECT, OutboxKind.ANNOUNCE)
"""What asks for it, first things first: what is over comes before what goes on."""
PROJECTOR = "projector"
_LEASE = "p:"
_ASKS = rows.c.kind.in_([kind.value for kind in KINDS])


def lease_of(ablation_id: str) -> str:
    """Return the name of the lease on writing an ablation into MLflow."""
    return f"{_LEASE}{ablation_id}"


def next_due(connection: Connection, holder: str, *, last_first: bool = False) -> str | None:
    """Return the ablation that is due first of those that no other projector has in hand."""
    others = leaders.c.duty.startswith(_LEASE) & (leaders.c.holder != holder) & (leaders.c.until > db_now())
    in_hand = select(leaders.c.duty).where(others)
    for kind in KINDS:
        due = outbox.in_order(outbox.due_rows(kind, limit=1), last_first=last_first)
        row = connection.execute(due.where((_LEASE + rows.c.key).not_in(in_hand))).first()
        if row is not None:
            return str(row.key)
    return None


def begin(connection: Connection, ablation_id: str) -> list[outbox.OutboxRow]:
    """Count a try at every row that asks for the ablation, whether it is due or not, and return them."""
    mine = _ASKS & (rows.c.key == ablation_id)
    found = outbox.rows_of(connection, select(rows).where(mine).order_by(rows.c.id))
    tried = update(rows).where(rows.c.id.in_([row.id for row in found]))
    connection.execute(tried.values(tries=rows.c.tries + 1))
    return found


def lags(connection: Connection) -> dict[str, float]:
    """Return for every living projector the age of the oldest row that it answers now, in seconds; 0 for none."""
    living = leaders.c.until > db_now()
    present = select(leaders.c.holder).where(living, leaders.c.duty.startswith(f"{PROJECTOR}:"))
    found = dict.fromkeys(connection.execute(present).scalars(), 0.0)
    age_s = db_now() - func.min(rows.c.created_at)
    busy = select(leaders.c.holder, age_s).join(rows, _ASKS & (leaders.c.duty == _LEASE + rows.c.key)).where(living)
    for holder, lag_s in connection.execute(busy.group_by(leaders.c.holder)):
        found[holder] = lag_s
    return found
