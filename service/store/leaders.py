"""Leases on duties and on single ablations: a row with a holder and a time until which it counts."""

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.store.columns import db_now
from service.store.session import Store
from service.store.tables import leaders

FORGET_S = 3600.0
"""Rows of processes that are gone are forgotten so long after they ended to count."""
_OWN = ":"
"""Stands in the names of rows that come and go: `projector:` and a number, `p:` and an ablation."""


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


def renew_duty(connection: Connection, duty: str, holder: str, *, lease_s: float) -> bool:
    """Renew `duty` for `lease_s`; return False when another holder has it, or nobody."""
    mine = update(leaders).where(leaders.c.duty == duty, leaders.c.holder == holder)
    return bool(connection.execute(mine.values(until=db_now() + lease_s)).rowcount)


def end_duty(connection: Connection, duty: str, holder: str) -> bool:
    """Forget that `holder` had `duty`; return False when another holder has it, or nobody."""
    mine = delete(leaders).where(leaders.c.duty == duty, leaders.c.holder == holder)
    return bool(connection.execute(mine).rowcount)


def drop_duty(connection: Connection, duty: str, holder: str) -> None:
    """Let another process take `duty` at once."""
    mine = update(leaders).where(leaders.c.duty == duty, leaders.c.holder == holder)
    connection.execute(mine.values(until=db_now()))


DUTIES = ("reconciler", "judge", "projector", "wakes", "webhooks", "retention")
"""What the background process does, as rows; somebody holds each while all is well."""


def lapsed_duties(connection: Connection) -> list[str]:
    """Return the duties that nobody holds now."""
    held = connection.execute(select(leaders.c.duty).where(leaders.c.until > db_now())).scalars()
    return sorted(set(DUTIES).difference(name.partition(_OWN)[0] for name in held))


def duty_of_its_own(duty: str, holder: str) -> str:
    """Return the name of the row by which one of several processes says that it does `duty`."""
    return f"{duty}{_OWN}{holder[-10:]}"


def forget_lapsed(connection: Connection) -> None:
    """Forget what processes that are long gone held for themselves."""
    own = leaders.c.duty.contains(_OWN)
    connection.execute(delete(leaders).where(own, leaders.c.until < db_now() - FORGET_S))


def touch_nothing(connection: Connection) -> None:
    """Change no row, the way rows are changed: a database that only reads refuses it."""
    connection.execute(update(leaders).where(leaders.c.duty == "").values(holder=""))
