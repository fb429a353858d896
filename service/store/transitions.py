"""Moves of state machines: the row changes, the table of allowed moves is asked, and an event says who and why."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, bindparam, insert, select, update

from service.errors import IllegalMove
from service.lifecycle import check_move
from service.store.columns import db_now
from service.store.tables import ablations, attempts, blocks, events, trials

TABLES: dict[str, Table] = {"ablation": ablations, "block": blocks, "trial": trials, "attempt": attempts}

_IDS_PER_STATEMENT = 5000

_INSERT_EVENTS = (
    insert(events)
    .inline()
    .values(
        ablation_id=bindparam("ablation_id"),
        at=db_now(),
        kind=bindparam("kind"),
        subject=bindparam("subject"),
        old=bindparam("old"),
        new=bindparam("new"),
        actor=bindparam("actor"),
        reason=bindparam("reason"),
        data=bindparam("data"),
    )
)


class Journal:
    """The events of one transaction about one ablation, written together by `flush`."""

    def __init__(self, connection: Connection, ablation_id: str, *, actor: str) -> None:
        self._connection = connection
        self._ablation_id = ablation_id
        self._actor = actor
        self._rows: list[dict[str, Any]] = []

    def note(
        self,
        kind: str,
        subject: str,
        *,
        reason: str,
        old: str | None = None,
        new: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember an event that is not a move."""
        self._rows.append(
            {
                "ablation_id": self._ablation_id,
                "kind": kind,
                "subject": subject,
                "old": old,
                "new": new,
                "actor": self._actor,
                "reason": reason,
                "data": json.dumps(data) if data else "{}",
            }
        )

    def move(self, machine: str, ids: Sequence[str], old: str, new: str, *, reason: str, **values: Any) -> None:
        """Move rows from `old` to `new` with further column `values`, and remember one event each.

        Raises IllegalMove when the table does not allow it or a row is not in `old`.
        """
        if not ids:
            return
        check_move(machine, old, new)
        table = TABLES[machine]
        for start in range(0, len(ids), _IDS_PER_STATEMENT):
            part = ids[start : start + _IDS_PER_STATEMENT]
            changed = self._connection.execute(
                update(table).where(table.c.id.in_(part), table.c.state == old).values(state=new, **values)
            )
            if changed.rowcount != len(part):
                raise IllegalMove(f"{len(part) - changed.rowcount} of {len(part)} {machine} rows were not {old!r}")
        for subject in ids:
            self.note(f"{machine}.state", subject, reason=reason, old=old, new=new)

    def flush(self) -> None:
        """Write the events, in order, under the ablation's lock."""
        if self._rows:
            lock_ablation(self._connection, self._ablation_id)
            self.flush_new()

    def flush_new(self) -> None:
        """Write the events of an ablation that this transaction created, which nobody else can see yet."""
        rows = self._rows
        self._connection.execute(_INSERT_EVENTS, rows[0] if len(rows) == 1 else rows)
        self._rows = []


def lock_ablation(connection: Connection, ablation_id: str) -> str:
    """Lock the ablation's row until the transaction ends; return its state."""
    query = select(ablations.c.state).where(ablations.c.id == ablation_id).with_for_update()
    return str(connection.execute(query).scalar_one())
