"""Injects the faults of a plan into a running system, some at the same time, and records each."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from tests.chaos.faults import TRICKS, Fault
from tests.chaos.people import People
from tests.chaos.proxies import Trick
from tests.chaos.system import System

_TICK_S = 0.05
_AT_ONCE = 5
_TARGET_PATIENCE_S = 20.0
"""How long a fault waits for its target, such as a running trainer."""
_TRICK_PATIENCE_S = 10.0


@dataclass
class Active:
    """A fault in progress."""

    fault: Fault
    until: float
    trick: Trick | None
    end: ExitStack


@dataclass(frozen=True)
class Record:
    """An injected fault."""

    kind: str
    target: str
    seconds: float
    at_s: float
    """Seconds since the start of the run."""


class Injector:
    """Injects one plan into one system."""

    def __init__(self, system: System, people: People, faults: Iterator[Fault]) -> None:
        self.records: list[Record] = []
        self.missed: list[Fault] = []
        """Faults whose target did not appear."""
        self._system, self._people, self._faults = system, people, faults
        self._active: list[Active] = []
        self._waiting: list[tuple[float, Fault]] = []
        self._began = time.monotonic()

    def inject(self, count: int) -> None:
        """Inject `count` more faults, then end those in progress."""
        total, next_at = len(self.records) + count, time.monotonic()
        while len(self.records) < total:
            now = time.monotonic()
            if now >= next_at and len(self._waiting) < 2 * _AT_ONCE:
                fault = next(self._faults)
                self._waiting.append((now + _TARGET_PATIENCE_S, fault))
                next_at = now + fault.pause_s
            self._begin_waiting(now)
            self._end_active(now)
            self.tick()
        self._waiting.clear()
        self._end_active(float("inf"))
        for link in self._system.all_links().values():
            link.end_stranded()

    def tick(self) -> None:
        """Let the operator act, and wait a little."""
        self._system.tick()
        time.sleep(_TICK_S)

    def _begin_waiting(self, now: float) -> None:
        for entry in list(self._waiting):
            patience, fault = entry
            rooms = {active.fault.room for active in self._active}
            if len(self._active) < _AT_ONCE and fault.room not in rooms and self._begin(fault, now):
                self._waiting.remove(entry)
            elif now > patience:
                self._waiting.remove(entry)
                self.missed.append(fault)

    def _begin(self, fault: Fault, now: float) -> bool:
        begun = fault.begin(self._system, self._people)
        if begun is None:
            return False
        end = ExitStack()
        yielded = end.enter_context(begun)
        trick = yielded if isinstance(yielded, Trick) else None
        lasts = _TRICK_PATIENCE_S if fault.kind in TRICKS else fault.seconds
        self._active.append(Active(fault, now + lasts, trick, end))
        if trick is None:
            self._note(fault)
        return True

    def _end_active(self, now: float) -> None:
        for active in list(self._active):
            played = active.trick is not None and active.trick.played
            if now < active.until and not played:
                continue
            active.end.close()
            self._active.remove(active)
            if played:
                self._note(active.fault)
            elif active.trick is not None:
                self.missed.append(active.fault)

    def _note(self, fault: Fault) -> None:
        at_s = round(time.monotonic() - self._began, 2)
        self.records.append(Record(fault.kind, fault.target, round(fault.seconds, 2), at_s))

    def history(self) -> list[dict[str, object]]:
        """Return every injected fault, oldest first."""
        return [asdict(record) for record in self.records]
