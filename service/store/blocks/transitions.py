"""State transitions: the table of allowed moves is asked, the row changes, and an event says who did it and why.

Readers get an ablation's events in order, by sequence number.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Connection, Integer, Row, Table, bindparam, func, select, update
from sqlalchemy.sql.dml import ReturningUpdate

from experiments.outcomes import AblationState, AttemptState, BlockState, TrialState
from service.errors import IllegalMove
from service.lifecycle import STATE_EVENTS, EventKind, State, check_move
from service.store.columns import db_now
from service.store.inserts import Part, Target, insert_all
from service.store.nodes.placement import BUSY_DEVICES
from service.store.tables import ablations, attempts, blocks, events, trials


def counters(ablation: ColumnElement[str]) -> tuple[ColumnElement[Any], ...]:
    """Return columns of the ablation with this id; `devices` are those that one of its blocks keeps busy.

    The id has to be a value: what a change returns names columns without their table on SQLite.
    """
    first = select(BUSY_DEVICES).where(blocks.c.ablation_id == ablation, blocks.c["index"] == 0)
    devices = first.scalar_subquery().label("devices")
    own = (ablations.c.id, ablations.c.state, ablations.c.device_s, ablations.c.device_minutes)
    return (*own, devices, *(ablations.c[f"blocks_{state}"] for state in BlockState))


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

    def __init__(
        self, connection: Connection, ablation_id: str, *, actor: str, locked: AblationState | None = None
    ) -> None:
        """Begin; `locked` is the ablation's state where the caller has locked it."""
        self._connection = connection
        self._ablation_id = ablation_id
        self._actor = actor
        self._rows: list[dict[str, Any]] = []
        self._counted: Counter[str] = Counter()
        self._ended: list[str] = []
        self._settled: list[str] = []
        self._columns: dict[str, Any] = {}
        self._inserts: list[Part] = []
        self._state = locked

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
        """Remember moves that a statement of the caller's made. Raises IllegalMove."""
        check_move(old, new)
        self._count(ids, old, new)
        for subject in ids:
            self.add_event(STATE_EVENTS[type(old)], subject, reason=reason, old=old, new=new)

    def set_columns(self, **values: Any) -> None:
        """Remember further columns of the ablation that change, together with its counters."""
        self._columns |= values

    def add_row(self, target: Target, row: Mapping[str, Any]) -> None:
        """Remember a row of another table, which is written together with the events."""
        self._inserts.append((target, [row]))

    def _count(self, ids: Sequence[str], old: State, new: State) -> None:
        """Remember what a move changes in the ablation's counters."""
        if isinstance(new, BlockState):
            self._counted[f"blocks_{old}"] -= len(ids)
            self._counted[f"blocks_{new}"] += len(ids)
        elif new is TrialState.DONE:
            self._counted["trials_done"] += len(ids)
        elif isinstance(new, AttemptState):
            self._ended += ids if old is AttemptState.RUNNING else ()
            self._settled += ids if new is AttemptState.DONE else ()

    def flush(self) -> Row[Any] | None:
        """Write the events, in order, all rows and the counters, under the ablation's lock.

        Return the counters as they are now, None when none has changed.
        """
        if not (self._rows or self._inserts or self._columns):
            return None
        self.lock()
        parts, change = [*self._inserts, self.new_events()], self._change()
        written = insert_all(self._connection, parts, self._values(), then=change)
        self._inserts, self._counted, self._ended, self._settled, self._columns = [], Counter(), [], [], {}
        return None if change is None or written is None else written.one()

    def _change(self) -> ReturningUpdate[Any] | None:
        """Return what adds what the moves changed, so that nothing ever has to count an ablation's blocks again."""
        counted = tuple(sorted(name for name, by in self._counted.items() if by))
        columns = ((name, to if isinstance(to, ColumnElement) else None) for name, to in self._columns.items())
        if not (counted or self._columns or self._ended or self._settled):
            return None
        sums = tuple(name for name, ids in self._sums.items() if ids)
        return _changing(counted, tuple(sorted(columns, key=lambda column: column[0])), sums)

    @property
    def _sums(self) -> dict[str, list[str]]:
        """Return the attempts whose seconds are added, by column."""
        return {"device_s": self._ended, "settled_s": self._settled}

    def _values(self) -> dict[str, Any]:
        """Return the parameters of what `_change` returns."""
        plain = {f"to_{name}": to for name, to in self._columns.items() if not isinstance(to, ColumnElement)}
        added = {f"of_{name}": ids for name, ids in self._sums.items() if ids}
        return {"changed": self._ablation_id, **{f"by_{n}": by for n, by in self._counted.items()}, **plain, **added}

    def flush_new(self) -> None:
        """Write the events of an ablation that this transaction created, which nobody else can see yet."""
        insert_all(self._connection, [self.new_events()])

    def new_events(self) -> Part:
        """Hand the events over to who inserts them together with what they are about."""
        rows, self._rows = self._rows, []
        return _EVENTS, rows


def _seconds(ids: str) -> ColumnElement[float]:
    """Return how long the attempts of the parameter `ids` took in all."""
    own = attempts.c.id.in_(bindparam(ids, expanding=True))
    taken = select(func.sum(attempts.c.ended_at - attempts.c.started_at)).where(own)
    return func.coalesce(taken.scalar_subquery(), 0.0)


_CHANGED: BindParameter[str] = bindparam("changed", type_=ablations.c.id.type)


@lru_cache(maxsize=256)
def _changing(
    counted: tuple[str, ...], columns: tuple[tuple[str, ColumnElement[Any] | None], ...], sums: tuple[str, ...]
) -> ReturningUpdate[Any]:
    """Return the change of an ablation by counters and columns, those without an expression by their values.

    Statements are built once: to build them costs more than to run them.
    """
    values: dict[str, Any] = {n: ablations.c[n] + bindparam(f"by_{n}", type_=Integer) for n in counted}
    for name, to in columns:
        values[name] = bindparam(f"to_{name}", type_=ablations.c[name].type) if to is None else to
    for name in sums:
        values[name] = ablations.c[name] + _seconds(f"of_{name}")
    return update(ablations).where(ablations.c.id == _CHANGED).values(**values).returning(*counters(_CHANGED))


_LOCK = select(ablations.c.state).where(ablations.c.id == bindparam("ablation")).with_for_update()


def lock_ablation(connection: Connection, ablation_id: str) -> AblationState:
    """Lock the ablation's row until the transaction ends; return its state."""
    return AblationState(connection.execute(_LOCK, {"ablation": ablation_id}).scalar_one())


def events_after(connection: Connection, ablation_id: str, seq: int, *, limit: int = 500) -> list[Row[Any]]:
    """Return the events of an ablation with a sequence number above `seq`, oldest first."""
    query = select(events).where(events.c.ablation_id == ablation_id, events.c.seq > seq)
    return list(connection.execute(query.order_by(events.c.seq).limit(limit)))


def ending(connection: Connection, ablation_id: str) -> Row[Any]:
    """Return the ablation's state, whether it has a verdict, and when it ended."""
    query = select(ablations.c.state, ablations.c.verdict.is_not(None).label("judged"), ablations.c.finished_at)
    return connection.execute(query.where(ablations.c.id == ablation_id)).one()
