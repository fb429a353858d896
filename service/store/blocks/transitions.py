"""Moves between states, used by every step in the life of a block.

`Transitions` checks each move against service/lifecycle.py, changes the rows, writes one event a move (who, why), and
keeps the counters of the ablation.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, func, insert, select, update

from ablate.experiments.outcomes import AblationState, AttemptState, BlockState, TrialState
from ablate.service.errors import IllegalMove
from ablate.service.lifecycle import STATE_EVENTS, EventKind, State, check_move
from ablate.service.store.tables import ablations, attempts, blocks, db_now, events, trials

_TABLES: dict[type[StrEnum], Table] = {
    AblationState: ablations,
    BlockState: blocks,
    TrialState: trials,
    AttemptState: attempts,
}
_IDS_PER_STATEMENT = 5000


class Transitions:
    """The moves of one transaction in one ablation; `flush` writes their events and counts."""

    def __init__(
        self, connection: Connection, ablation_id: str, *, actor: str, locked: AblationState | None = None
    ) -> None:
        """Begin; `locked` is the ablation's state if the caller has locked it."""
        self._connection = connection
        self._ablation_id = ablation_id
        self._actor = actor
        self._state = locked
        self._events: list[dict[str, Any]] = []
        self._counted: Counter[str] = Counter()
        self._attempts: dict[str, list[str]] = {"device_s": [], "settled_s": []}
        """Attempts whose seconds are added to a column of the ablation."""
        self._columns: dict[str, Any] = {}

    def lock(self) -> AblationState:
        """Lock the ablation until the transaction ends; return its state."""
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
        """Queue an event for `flush`."""
        self._events.append(
            {
                "ablation_id": self._ablation_id,
                "kind": kind.value,
                "subject": subject,
                "old": old,
                "new": new,
                "actor": self._actor,
                "reason": reason,
                "data": json.dumps(data or {}),
            }
        )

    def move(self, ids: Sequence[str], old: State, new: State, *, reason: str, **values: Any) -> None:
        """Move rows from `old` to `new`, set further columns to `values`, and queue an event for each row.

        The type of the states selects the table. Raises IllegalMove if the move is not allowed or a row is not in
        `old`.
        """
        if not ids:
            return
        check_move(old, new)
        table = _TABLES[type(old)]
        for start in range(0, len(ids), _IDS_PER_STATEMENT):
            part = ids[start : start + _IDS_PER_STATEMENT]
            changed = self._connection.execute(
                update(table).where(table.c.id.in_(part), table.c.state == old).values(state=new, **values)
            )
            if changed.rowcount != len(part):
                raise IllegalMove(f"{len(part) - changed.rowcount} of {len(part)} {table.name} were not {old.value!r}")
        self.add_moves(ids, old, new, reason=reason)

    def add_moves(self, ids: Sequence[str], old: State, new: State, *, reason: str) -> None:
        """Count moves that the caller's own statement made, and queue their events. Raises IllegalMove."""
        check_move(old, new)
        if isinstance(new, BlockState):
            self._counted[f"blocks_{old}"] -= len(ids)
            self._counted[f"blocks_{new}"] += len(ids)
        elif new is TrialState.DONE:
            self._counted["trials_done"] += len(ids)
        elif isinstance(new, AttemptState):
            self._attempts["device_s"] += ids if old is AttemptState.RUNNING else ()
            self._attempts["settled_s"] += ids if new is AttemptState.DONE else ()
        for subject in ids:
            self.add_event(STATE_EVENTS[type(old)], subject, reason=reason, old=old, new=new)

    def set_columns(self, **values: Any) -> None:
        """Set further columns of the ablation when `flush` writes its counters."""
        self._columns |= values

    def flush(self) -> None:
        """Write the events, in order, and the ablation's counters, under the ablation's lock."""
        changes = self._columns | {name: ablations.c[name] + by for name, by in self._counted.items() if by}
        changes |= {name: ablations.c[name] + _seconds(ids) for name, ids in self._attempts.items() if ids}
        if not (self._events or changes):
            return
        self.lock()
        if self._events:
            self._connection.execute(insert(events).values(at=db_now()), self._events)
        if changes:
            self._connection.execute(update(ablations).where(ablations.c.id == self._ablation_id).values(changes))
        self._events, self._counted, self._columns = [], Counter(), {}
        self._attempts = {name: [] for name in self._attempts}


def _seconds(attempt_ids: Sequence[str]) -> ColumnElement[float]:
    """Return how long these attempts took in all, in seconds."""
    took = select(func.sum(attempts.c.ended_at - attempts.c.started_at)).where(attempts.c.id.in_(attempt_ids))
    return func.coalesce(took.scalar_subquery(), 0.0)


def lock_ablation(connection: Connection, ablation_id: str) -> AblationState:
    """Lock the ablation until the transaction ends; return its state.

    All locks of the store leave keys alone (`key_share`): two transactions that refer to one ablation by a foreign key
    would otherwise wait for each other's lock on it.
    """
    query = select(ablations.c.state).where(ablations.c.id == ablation_id).with_for_update(key_share=True)
    return AblationState(connection.execute(query).scalar_one())
