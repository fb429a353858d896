"""Watches /proc for trainers: which ran when, on which device, for which trial. Asks neither worker nor service."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.processes import command_line, look

EVERY_S = 0.03
_YOUNG_S = 10.0
"""A fork becomes a trainer, with a session and a log of its own, some milliseconds after it is there."""


@dataclass
class Span:
    """A trainer that was seen alive from `began` to `seen`, in seconds of a clock that is never set."""

    node: str
    attempt: str
    trial: str
    pid: int
    began: float
    seen: float

    def overlaps(self, other: "Span") -> float:
        """Return for how long both were alive at the same time, at least."""
        return min(self.seen, other.seen) - max(self.began, other.began)


class TrainerWatch:
    """Looks every few hundredths of a second; a trainer that lives shorter than that may be missed."""

    def __init__(self, home: Path) -> None:
        self.spans: list[Span] = []
        self._home = home
        self._living: dict[int, tuple[int, Span]] = {}
        self._young: dict[int, float] = {}
        self._strangers: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainers", daemon=True)

    def __enter__(self) -> "TrainerWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def pids(self, node: str) -> list[int]:
        """Return the trainers that live on a node now."""
        return [pid for pid, (_born, span) in list(self._living.items()) if span.node == node]

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._look()

    def _look(self) -> None:
        for pid, (born, span) in list(self._living.items()):
            before, seen = time.monotonic(), look(pid)
            if seen is None or seen.born != born:
                del self._living[pid]
            else:
                span.seen = before
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - in a tight loop
        self._strangers &= there
        for pid in there - self._strangers - self._living.keys():
            self._meet(pid)

    def _meet(self, pid: int) -> None:
        """Decide whether a process is a trainer, a stranger, or too young to tell."""
        seen = look(pid)
        first = self._young.setdefault(pid, time.monotonic())
        is_fork = seen is not None and "multiprocessing.forkserver" in command_line(pid)
        span = self._span(pid) if seen is not None and is_fork and seen.session == pid else None
        if seen is not None and span is not None:
            self._living[pid] = (seen.born, span)
            self.spans.append(span)
        elif is_fork and time.monotonic() - first < _YOUNG_S:
            return
        else:
            self._strangers.add(pid)
        del self._young[pid]

    def _span(self, pid: int) -> Span | None:
        """Read from its log's path which trial a trainer runs."""
        try:
            log = Path(f"/proc/{pid}/fd/1").readlink()
        except OSError:
            return None
        if log.name != "log.txt" or not log.is_relative_to(self._home):
            return None
        node, _work, attempt, trial, _log = log.relative_to(self._home).parts
        now = time.monotonic()
        return Span(node, attempt, trial, pid, now, now)
