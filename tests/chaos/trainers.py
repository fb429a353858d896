"""Watches /proc for trainers and records node, attempt, trial and time. Asks neither worker nor service."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.processes import command_line, look

EVERY_S = 0.03
_YOUNG_S = 10.0
"""A fork becomes a trainer, with its own session and log, some milliseconds after its start."""


@dataclass
class Span:
    """A trainer that was alive from `began` to `seen`, in seconds of a monotonic clock."""

    node: str
    attempt: str
    trial: str
    pid: int
    began: float
    seen: float

    def overlaps(self, other: "Span") -> float:
        """Return the least time for which both were alive together, in seconds."""
        return min(self.seen, other.seen) - max(self.began, other.began)


class TrainerWatch:
    """Reads /proc every few hundredths of a second, and may miss a trainer with a shorter life."""

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
        """Return the living trainers of a node."""
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
        """Decide whether a process is a trainer, another program, or too young for a decision."""
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
        """Return the attempt and trial of a trainer, from the path of its log."""
        try:
            log = Path(f"/proc/{pid}/fd/1").readlink()
        except OSError:
            return None
        if log.name != "log.txt" or not log.is_relative_to(self._home):
            return None
        node, _work, attempt, trial, _log = log.relative_to(self._home).parts
        now = time.monotonic()
        return Span(node, attempt, trial, pid, now, now)
