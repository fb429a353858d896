"""The leader among the background processes: one row with a holder and the end of its lease."""

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from ablate.service.store.session import Store
from ablate.service.store.tables import db_now, has_passed, leaders

DUTIES = ("reconciler", "judge", "projector", "wakes", "webhooks", "notifications", "retention")
"""What the leader does, each in a thread of its own."""

_LEASE = "background"
"""The row of the lease."""
_MARK = "readiness"
"""The row that readiness checks write."""
_IS_LEASE = leaders.c.duty == _LEASE
_IS_MARK = leaders.c.duty == _MARK


def take_lease(store: Store, holder: str, *, lease_s: float) -> bool:
    """Make `holder` the leader for `lease_s` seconds; return False while another process leads."""
    with store.read() as connection:
        if has_leader(connection, lease_s=lease_s):
            return False
    try:
        with store.write() as connection:
            connection.execute(delete(leaders).where(_IS_LEASE, has_passed(leaders.c.until, longest_s=lease_s)))
            row = insert(leaders).values(duty=_LEASE, holder=holder, until=db_now() + lease_s)
            connection.execute(row)
    except IntegrityError:  # another process was faster
        return False
    return True


def renew_lease(connection: Connection, holder: str, *, lease_s: float) -> bool:
    """Let `holder` lead for another `lease_s` seconds; return False if another process has taken over."""
    own = update(leaders).where(_IS_LEASE, leaders.c.holder == holder)
    return bool(connection.execute(own.values(until=db_now() + lease_s)).rowcount)


def leads(connection: Connection, holder: str) -> bool:
    """Tell whether no other process has taken over from `holder`."""
    return connection.execute(select(leaders.c.duty).where(_IS_LEASE, leaders.c.holder == holder)).first() is not None


def resign(connection: Connection, holder: str) -> None:
    """Let another process lead at once."""
    connection.execute(delete(leaders).where(_IS_LEASE, leaders.c.holder == holder))


def has_leader(connection: Connection, *, lease_s: float) -> bool:
    """Tell whether a background process leads now, by a lease of `lease_s` seconds."""
    lasts = ~has_passed(leaders.c.until, longest_s=lease_s)
    return connection.execute(select(leaders.c.duty).where(_IS_LEASE, lasts)).first() is not None


def write_mark(connection: Connection, mark: str) -> None:
    """Store `mark` in the row of readiness checks, as a change that a full or read-only database rejects."""
    row = {"holder": mark, "until": 0.0}
    if not connection.execute(update(leaders).where(_IS_MARK).values(row)).rowcount:
        connection.execute(insert(leaders).values(row | {"duty": _MARK}))


def read_mark(connection: Connection) -> str | None:
    """Return the mark of the latest readiness check of any process."""
    return connection.execute(select(leaders.c.holder).where(_IS_MARK)).scalar_one_or_none()
