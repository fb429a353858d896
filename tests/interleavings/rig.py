"""Stop one operation before each of its statements, do another one meanwhile, and judge answers and database.

The oracle is the two serial orders: an interleaving must end in the answers and the state of one of them. A deadlock,
an unexpected error and an answer with status 5xx are faults in any case.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, event, text

from tests.chaos import checker
from tests.chaos.ledger import Ledger, books_of
from tests.interleavings.world import OPERATIONS, Answer, World, observed

LIMIT_S = 20.0
_RULES = (
    checker.plan_is_stored_whole,
    checker.ended_ablations_add_up,
    checker.one_receipt_for_every_counted_trial,
    checker.attempts_follow_each_other,
    checker.every_move_is_allowed,
    checker.failed_blocks_used_their_attempts_up,
)
"""Rules of the checker that hold at any moment."""
_POLL_S = 0.002
IN_FLIGHT = "urn:ablate:problem:idempotency-in-flight"
"""The answer to a submission that is in progress already: the client asks again. No serial order gives it."""
_LOCKED = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Answers and state after two operations."""

    first: Answer
    second: Answer
    state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An interleaving that no serial order explains."""

    world: str
    first: str
    second: str
    statement: int
    """Number of the statement of `first` before which `second` ran, from 1."""
    text: str
    """Begin of that statement."""
    problem: str

    @property
    def kind(self) -> tuple[str, ...]:
        """Faults of one pair with one problem are one fault."""
        return self.world, self.first, self.second, self.problem

    def __str__(self) -> str:
        where = f"statement {self.statement} ({self.text})"
        return f"{self.world}: '{self.second}' before {where} of '{self.first}': {self.problem}"


class _Gate:
    """Stops the thread that executes a statement."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._count = 0
        self._lock = threading.Lock()
        self.reached, self.opened = threading.Event(), threading.Event()
        self.statement = ""

    def pass_or_wait(self, statement: str) -> None:
        """Count a statement; wait at the one to stop before."""
        with self._lock:
            if self.reached.is_set():
                return
            self._count += 1
            if self._count != self._at:
                return
            self.statement = " ".join(statement.split())[:80]
            self.reached.set()
        self.opened.wait(LIMIT_S)


@contextmanager
def _stopped_at(world: World, number: int) -> Iterator[_Gate]:
    """Stop before each statement of a writing transaction, and before the first one of a reading transaction.

    A reading transaction sees the data of its first statement, so a stop between its later ones changes nothing.
    """
    gate = _Gate(number)
    reading = WeakSet[Connection]()

    def before_statement(connection: Connection, _cursor: Any, statement: str, *_rest: Any) -> None:
        if connection.engine is world.api.store.reader:
            if connection in reading:
                return
            reading.add(connection)
        gate.pass_or_wait(statement)

    def before_commit(_connection: Any) -> None:
        gate.pass_or_wait("COMMIT")

    engine = world.api.store.writer
    event.listen(engine, "before_cursor_execute", before_statement)
    event.listen(engine, "commit", before_commit)
    try:
        yield gate
    finally:
        gate.opened.set()
        event.remove(engine, "before_cursor_execute", before_statement)
        event.remove(engine, "commit", before_commit)


def _called(name: str, world: World) -> Answer:
    try:
        return OPERATIONS[name](world)
    except Exception as error:  # an error of the background process, which has no status
        return ("error", f"{type(error).__name__}: {error}"[:300])


def serial(world: World, first: str, second: str) -> Outcome:
    """Return the outcome of `first`, then `second`."""
    world.restore()
    one = _called(first, world)
    two = _called(second, world)
    return Outcome(first=one, second=two, state=observed(world))


def interleaved(
    world: World, first: str, second: str, number: int, pool: ThreadPoolExecutor
) -> tuple[Outcome, str] | None:
    """Return the outcome of `second` in the middle of `first`, and the statement; None if `first` has fewer."""
    world.restore()
    with _stopped_at(world, number) as gate:
        one = pool.submit(_called, first, world)
        _wait(lambda: gate.reached.is_set() or one.done())
        if not gate.reached.is_set():
            one.result()
            return None
        two = pool.submit(_called, second, world)
        _wait_or_blocked(world, two)
        gate.opened.set()
        outcome = one.result(LIMIT_S), two.result(LIMIT_S)
    return Outcome(first=outcome[0], second=outcome[1], state=observed(world)), gate.statement


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S)


def _wait_or_blocked(world: World, call: "Future[Answer]") -> None:
    """Wait until the call has ended, or waits for a lock that the stopped operation holds."""
    engine = world.watcher
    deadline = time.monotonic() + LIMIT_S
    while not call.done() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        with engine.connect() as connection:
            if not call.done() and connection.scalar(_LOCKED):
                return


def faults(world: World, first: str, second: str, pool: ThreadPoolExecutor) -> Iterator[Fault | None]:
    """Try `second` before every statement of `first` but the first one; yield a fault, or None, for each.

    Before the first statement it is the serial order.
    """
    expected = [serial(world, first, second)]
    swapped = serial(world, second, first)
    expected.append(Outcome(first=swapped.second, second=swapped.first, state=swapped.state))
    number = 1
    while True:
        number += 1
        ended = interleaved(world, first, second, number, pool)
        if ended is None:
            return
        outcome, statement = ended
        problem = _problem(outcome, expected, (first, second), spent=world.name == "spent") or _broken_rule(world)
        yield (
            None
            if problem is None
            else Fault(world=world.name, first=first, second=second, statement=number, text=statement, problem=problem)
        )


def _problem(outcome: Outcome, expected: list[Outcome], names: tuple[str, str], *, spent: bool) -> str | None:
    for answer in (outcome.first, outcome.second):
        if answer[0] == "error" or (isinstance(answer[0], int) and answer[0] >= 500):
            return f"answers {outcome.first} and {outcome.second}"
    if outcome in expected or IN_FLIGHT in (outcome.first[-1], outcome.second[-1]):
        return None
    if spent and "cancel" in names:
        return None  # the block goes through the queue before it is cancelled; the checker reads how
    answers = (outcome.first, outcome.second)
    if answers not in [(one.first, one.second) for one in expected]:
        serial_answers = [(one.first, one.second) for one in expected]
        return f"answers {answers}; one after the other: {serial_answers}"
    if any(name.startswith("claim") for name in names):
        return None  # a claim passes over a block that another transaction has locked, and takes the next one
    nearest = min(expected, key=lambda one: (answers != (one.first, one.second), len(_different(outcome, one))))
    return f"the state differs: {_different(outcome, nearest)}"


def _broken_rule(world: World) -> str | None:
    books = books_of(world.api.store, Ledger())
    books.cancelled = {world.ablation}
    sentences = (f"{rule.__name__}: {sentence}" for rule in _RULES for sentence in rule(books))
    expected = "blocks of it were cancelled" if world.name == "spent" else "nothing"
    return next((sentence for sentence in sentences if expected not in sentence), None)


def _different(one: Outcome, other: Outcome) -> dict[str, Any]:
    different: dict[str, Any] = {}
    for key in sorted({*one.state, *other.state}):
        first, second = one.state.get(key), other.state.get(key)
        if first == second:
            continue
        if isinstance(first, list) and isinstance(second, list) and key in ("outbox", "receipts"):
            different[key] = [[x for x in first if x not in second], [x for x in second if x not in first]]
        else:
            different[key] = [first, second]
    return different
