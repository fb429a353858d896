"""State transitions: the table of allowed moves is asked, the row changes, and an event says who did it and why.

Readers get an ablation's events in order, by sequence number.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, Table, func, select, update

from experiments.outcomes import AblationState, AttemptState, BlockState, TrialState
from service.errors import IllegalMove
from service.lifecycle import STATE_EVENTS, EventKind, State, check_move
from service.store.columns import db_now
from service.store.inserts import Part, Target, insert_all
from service.store.tables import ablations, attempts, blocks, events, trials

_TABLES: dict[type[StrEnum], Table] = {
    AblationState: ablations,
    BlockState: blocks,
    TrialState: trials,
    AttemptState: attempts,
}

_IDS_PER_STATEMENT = 5000

_EVENTS = Target(table=events, made={"at": db_now()})


class Transitions:
    """What one transaction changes in one ablation; `flush` writes its events and keeps its counters."""

    def __init__(self, connection: Connection, ablation_id: str, *, actor: str) -> None:
        self._connection = connection
        self._ablation_id = ablation_id
        self._actor = actor
        self._rows: list[dict[str, Any]] = []
        self._counted: Counter[str] = Counter()
        self._ended: list[str] = []
        self._columns: dict[str, Any] = {}
        self._state: AblationState | None = None

    def lock(self) -> AblationState:
        """Lock the ablation's row until the transaction ends; return the state that it had when it was locked."""
        if self._state is None:
            self._state = lock_ablation(self._connection, self._ablation_id)
        return self._state

    def add_event(
        self,
        kind: EventKind,
        subject: str,
        *,
        reason: str,
        old: str | None = None,
        new: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Remember an event that is no move."""
        self._rows.append(
            {
                "ablation_id": self._ablation_id,
                "kind": kind.value,
                "subject": subject,
                "old": old,
                "new": new,
                "actor": self._actor,
                "reason": reason,
                "data": json.dumps(data) if data else "{}",
            }
        )

    def move(self, ids: Sequence[str], old: State, new: State, *, reason: str, **values: Any) -> None:
        """Move rows from `old` to `new` with further column `values`, and remember one event each.

        The states' type says of which table. Raises IllegalMove when the move is not allowed or a row is not in `old`.
        """
        if not ids:
            return
        check_move(old, new)
        table, kind = _TABLES[type(old)], STATE_EVENTS[type(old)]
        for start in range(0, len(ids), _IDS_PER_STATEMENT):
            part = ids[start : start + _IDS_PER_STATEMENT]
            changed = self._connection.execute(
                update(table).where(table.c.id.in_(part), table.c.state == old).values(state=new, **values)
            )
            if changed.rowcount != len(part):
                raise IllegalMove(f"{len(part) - changed.rowcount} of {len(part)} {table.name} were not {old.value!r}")
        self._count(ids, old, new)
        for subject in ids:
            self.add_event(kind, subject, reason=reason, old=old, new=new)

    def set_columns(self, **values: Any) -> None:
        """Remember further columns of the ablation that change, together with its counters."""
        self._columns |= values

    def _count(self, ids: Sequence[str], old: State, new: State) -> None:
        """Remember what a move changes in the ablation's counters."""
        if isinstance(new, BlockState):
            self._counted[f"blocks_{old}"] -= len(ids)
            self._counted[f"blocks_{new}"] += len(ids)
        elif new is TrialState.DONE:
            self._counted["trials_done"] += len(ids)
        elif old is AttemptState.RUNNING:
            self._ended += ids

    def flush(self) -> None:
        """Write the events, in order, and the counters, under the ablation's lock."""
        if self._rows:
            self.lock()
            self.flush_new()
            self._add_counts()

    def _add_counts(self) -> None:
        """Add what the moves changed, so that nothing ever has to count an ablation's blocks again."""
        changes = {name: ablations.c[name] + by for name, by in self._counted.items() if by} | self._columns
        if self._ended:
            seconds = select(func.sum(attempts.c.ended_at - attempts.c.started_at)).where(
                attempts.c.id.in_(self._ended)
            )
            changes["device_s"] = ablations.c.device_s + func.coalesce(seconds.scalar_subquery(), 0.0)
        if changes:
            self._connection.execute(update(ablations).where(ablations.c.id == self._ablation_id).values(**changes))
        self._counted, self._ended, self._columns = Counter(), [], {}

    def flush_new(self) -> None:
        """Write the events of an ablation that this transaction created, which nobody else can see yet."""
        insert_all(self._connection, [self.new_events()])

    def new_events(self) -> Part:
        """Hand the events over to who inserts them together with what they are about."""
        rows, self._rows = self._rows, []
        return _EVENTS, rows


def lock_ablation(connection: Connection, ablation_id: str) -> AblationState:
    """Lock the ablation's row until the transaction ends; return its state."""
    query = select(ablations.c.state).where(ablations.c.id == ablation_id).with_for_update()
    return AblationState(connection.execute(query).scalar_one())


def events_after(connection: Connection, ablation_id: str, seq: int, *, limit: int = 500) -> list[Row[Any]]:
    """Return the events of an ablation with a sequence number above `seq`, oldest first."""
    query = select(events).where(events.c.ablation_id == ablation_id, events.c.seq > seq)
    return list(connection.execute(query.order_by(events.c.seq).limit(limit)))


def ending(connection: Connection, ablation_id: str) -> Row[Any]:
    """Return the ablation's state, whether it has a verdict, and when it ended."""
    query = select(ablations.c.state, ablations.c.verdict.is_not(None).label("judged"), ablations.c.finished_at)
    return connection.execute(query.where(ablations.c.id == ablation_id)).one()
