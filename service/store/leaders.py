"""One process at a time per duty: a row with a holder and a time until which it counts."""

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.store.columns import db_now
from service.store.session import Store
from service.store.tables import leaders


def hold_duty(store: Store, duty: str, holder: str, *, lease_s: float) -> bool:
    """Take or renew `duty` for `lease_s`; return False while another holder has it."""
    free = (leaders.c.holder == holder) | (leaders.c.until <= db_now())
    values = {"holder": holder, "until": db_now() + lease_s}
    with store.write() as connection:
        if connection.execute(update(leaders).where(leaders.c.duty == duty, free).values(**values)).rowcount:
            return True
        if connection.execute(select(leaders.c.duty).where(leaders.c.duty == duty)).first():
            return False
    try:
        with store.write() as connection:
            connection.execute(insert(leaders).values(duty=duty, **values))
    except IntegrityError:
        return False
    return True


def drop_duty(connection: Connection, duty: str, holder: str) -> None:
    """Let another process take `duty` at once."""
    mine = update(leaders).where(leaders.c.duty == duty, leaders.c.holder == holder)
    connection.execute(mine.values(until=db_now()))


DUTIES = ("reconciler", "judge", "projector", "wakes", "webhooks", "retention")
"""What the background process does, as rows; somebody holds each while all is well."""


def lapsed_duties(connection: Connection) -> list[str]:
    """Return the duties that nobody holds now."""
    held = select(leaders.c.duty).where(leaders.c.until > db_now())
    return sorted(set(DUTIES).difference(connection.execute(held).scalars()))


def touch_nothing(connection: Connection) -> None:
    """Change no row, the way rows are changed: a database that only reads refuses it."""
    connection.execute(update(leaders).where(leaders.c.duty == "").values(holder=""))
