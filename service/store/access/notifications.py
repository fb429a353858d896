"""Notifications of owners, and the notices of single ablations, each of which is sent once.

Addresses and signing secrets are stored as they are, because the service sends with them.
"""

from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from ablate.experiments.ids import NIGHTLY_LABEL, new_id
from ablate.service.errors import Invalid, NotFound
from ablate.service.lifecycle import OutboxKind
from ablate.service.store import outbox
from ablate.service.store.tables import ablations, db_now, labels, notices, notifications, tokens
from ablate.service.store.tables import outbox as outbox_rows

MOST = 10
"""Most notifications of one token."""


def add(connection: Connection, token_id: str, kind: str, target: str, secret: str | None) -> str:
    """Store a notification and return its id. Raises Invalid if the token has too many."""
    count = select(func.count()).select_from(notifications).where(notifications.c.token_id == token_id)
    if (connection.scalar(count) or 0) >= MOST:
        raise Invalid(f"this token has {MOST} notifications and no more are allowed; remove one")
    own = {"id": new_id("ntf"), "token_id": token_id, "kind": kind, "target": target, "secret": secret}
    connection.execute(insert(notifications).values(**own, created_at=db_now()))
    return own["id"] or ""


def list_notifications(connection: Connection, token_id: str | None) -> list[Row[Any]]:
    """Return the notifications of a token, newest first, with what was sent; None for those of all."""
    mine = notices.c.notification_id == notifications.c.id
    waits = (outbox_rows.c.kind == OutboxKind.NOTIFY) & (outbox_rows.c.key == notices.c.id)
    sent = select(func.count()).select_from(notices).where(mine, notices.c.sent_at.is_not(None))
    waiting = select(func.count()).select_from(notices.join(outbox_rows, waits)).where(mine)
    problem = select(outbox_rows.c.last_error).select_from(notices.join(outbox_rows, waits)).where(mine)
    query: Select[Any] = select(
        notifications,
        tokens.c.name.label("owner"),
        sent.scalar_subquery().label("sent"),
        waiting.scalar_subquery().label("waiting"),
        problem.order_by(outbox_rows.c.id.desc()).limit(1).scalar_subquery().label("problem"),
    ).join(tokens, tokens.c.id == notifications.c.token_id)
    if token_id is not None:
        query = query.where(notifications.c.token_id == token_id)
    return list(connection.execute(query.order_by(notifications.c.id.desc())))


def remove(connection: Connection, notification_id: str, token_id: str | None) -> None:
    """Remove a notification of a token, or of any token for None. Raises NotFound."""
    query = delete(notifications).where(notifications.c.id == notification_id)
    if token_id is not None:
        query = query.where(notifications.c.token_id == token_id)
    if not connection.execute(query).rowcount:
        raise NotFound(f"you have no notification {notification_id!r}; ablate admin notifications list shows yours")


def ask(connection: Connection, ablation_id: str) -> None:
    """Ask for a notice to each notification of the ablation's owner that was not asked for before.

    `ablate nightly` itself tells of its ablations, once two of them prove something.
    """
    nightly = select(labels.c.key).where(labels.c.ablation_id == ablation_id, labels.c.key == NIGHTLY_LABEL)
    if connection.scalar(nightly) is not None:
        return
    asked = select(notices.c.notification_id).where(notices.c.ablation_id == ablation_id)
    wanted = select(notifications.c.id).join(ablations, ablations.c.token_id == notifications.c.token_id)
    wanted = wanted.join(tokens, tokens.c.id == notifications.c.token_id).where(tokens.c.revoked_at.is_(None))
    for row in list(connection.execute(wanted.where(ablations.c.id == ablation_id, notifications.c.id.not_in(asked)))):
        notice = new_id("ntc")
        connection.execute(insert(notices).values(id=notice, notification_id=row.id, ablation_id=ablation_id))
        outbox.add(connection, OutboxKind.NOTIFY, notice)


def notice_of(connection: Connection, notice_id: str) -> Row[Any] | None:
    """Return the notification and the ablation of a notice that is still to be sent; None if there is none."""
    mine = notifications.c.id == notices.c.notification_id
    query: Select[Any] = select(notices.c.ablation_id, notifications).join(notifications, mine)
    query = query.where(notices.c.id == notice_id, notices.c.sent_at.is_(None))
    return connection.execute(query).first()


def sent(connection: Connection, notice_id: str) -> None:
    """Store that a notice was accepted."""
    connection.execute(update(notices).where(notices.c.id == notice_id).values(sent_at=db_now()))
