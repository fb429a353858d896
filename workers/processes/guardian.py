"""A guardian process, which ends the trials of a dead or frozen worker, and the worker's end of its pipe.

The worker writes to the guardian's standard input which trials run ("+pgid trial", "-pgid trial") and until when the
lease of their block is good ("until SECONDS", boot time). The guardian answers every line with one byte. When the pipe
ends, the worker is dead, and the guardian ends the remaining trials. When a lease is over and a trial still runs, it
ends the trial and waits for the next lease.

The kernel already kills a trainer when its parent dies, but it kills neither the trainer's own children, nor anything
when the parent is only stopped.
"""

import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ablate.experiments.system.isolation import short_link
from ablate.experiments.system.processes import (
    OWN_PYTHON,
    children_of,
    descendants_of,
    end_all,
    group_members,
    parent_of,
    send,
    start_of,
    wait_until,
)
from ablate.workers.isolation.environment import trial_mark
from ablate.workers.lease import boot_time_s
from ablate.workers.processes.wake_event import STOP_SIGNALS

_log = logging.getLogger(__name__)

_MODULE = "ablate.workers.processes.guardian"
_ANSWER_PATIENCE_S = 10.0
"""A guardian that leaves a line unanswered for so long counts as frozen; its start takes most of a second."""
_END_PATIENCE_S = 5.0
_SERVER_PATIENCE_S = 2.0
"""Time in which a fork server ends after its worker, unless somebody has stopped it."""
_ANSWER = b"."
_READ_BYTES = 65_536
_CHECK_EVERY_S = 1.0
"""Longest wait: unlike the clock, a wait does not count the time in which the machine is suspended."""


class Guardian:
    """The worker's end: starts a guardian, reports trials and leases to it, and replaces it when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}
        """Process group by trial."""
        self._until = math.inf
        self._process: _GuardianProcess | None = None
        self._start()

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()

    @property
    def pid(self) -> int | None:
        """The guardian's process number, None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def watch(self, pgid: int, trial_id: str) -> None:
        """End this trial's processes when the worker dies, or when its lease is over."""
        with self._lock:
            self._running[trial_id] = pgid
            self._write(f"+{pgid} {trial_id}")

    def forget(self, pgid: int, trial_id: str) -> None:
        """Stop watching a finished trial: the kernel may use the number of its group again."""
        with self._lock:
            self._running.pop(trial_id, None)
            self._write(f"-{pgid} {trial_id}")

    def until(self, boot_time_s: float) -> None:
        """End every trial that still runs at this boot time, unless another call replaces the time before."""
        with self._lock:
            self._until = boot_time_s
            self._write(f"until {boot_time_s!r}")

    def check(self) -> None:
        """Make sure that a guardian runs and answers. Raises OSError when none can be started."""
        with self._lock:
            problem = "is missing" if self._process is None else self._process.problem()
            if problem is not None:
                _log.error("the guardian %s; starting another one", problem)
                if self._process is not None:
                    self._process.kill()
                self._process = None
                self._start()

    def _start(self) -> None:
        self._process = _GuardianProcess()
        self._write(f"until {self._until!r}")
        for trial_id, pgid in self._running.items():
            self._write(f"+{pgid} {trial_id}")

    def _write(self, line: str) -> None:
        if self._process is not None:
            self._process.write(line)


class _GuardianProcess:
    """A guardian process and the two pipes to it."""

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*OWN_PYTHON, "-m", _MODULE, str(os.getpid())], stdin=theirs, stdout=answers, start_new_session=True
            )
        except OSError:
            os.close(self._pipe)
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)
            os.close(answers)
        os.set_blocking(self._pipe, False)
        os.set_blocking(self._answers, False)
        self._unanswered: deque[float] = deque()
        """Times at which the unanswered lines were written."""

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def write(self, line: str) -> None:
        """Write one line. If that fails, `problem` shows it, and the next guardian receives everything."""
        self._unanswered.append(time.monotonic())
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self._pipe, f"{line}\n".encode())

    def problem(self) -> str | None:
        """Return why this guardian does not work, None when it does."""
        if self._process.poll() is not None:
            return f"{self._process.pid} died"
        with suppress(BlockingIOError):
            for _ in os.read(self._answers, max(1, len(self._unanswered))):
                self._unanswered.popleft()
        frozen = bool(self._unanswered) and time.monotonic() - self._unanswered[0] > _ANSWER_PATIENCE_S
        return f"{self._process.pid} does not answer" if frozen else None

    def close(self) -> None:
        """Let it end the remaining trials, and then itself."""
        os.close(self._pipe)
        os.close(self._answers)
        try:
            self._process.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Kill it before its pipe ends: a slow guardian would take the end of the pipe for its worker's death."""
        self._process.kill()
        self._process.wait()
        os.close(self._pipe)
        os.close(self._answers)


def end_trial(
    pgid: int,
    *,
    trial_id: str,
    grace_s: float,
    leader: Callable[[], bool] | None = None,
    orphans: Callable[[], Sequence[int]] = list,
) -> tuple[int, ...]:
    """End a trial's group and its strays: SIGTERM, `grace_s`, SIGKILL; return the survivors.

    A trial that has just been forked has no group of its own yet. While `leader` returns True, the trial's own process
    is alive and counts regardless of its group, with all of its descendants. Later they are among `orphans`.
    """
    mark = trial_mark(trial_id)

    def find() -> list[int]:
        first = {pgid} if leader is not None and leader() else set()
        return sorted({*first, *descendants_of(first), *group_members(pgid), *mark.members(), *orphans()})

    return end_all(find, grace_s=grace_s).survivors


class Watch:
    """The guardian's state: the trials of its worker, and until when they may run."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._until = math.inf
        self._torn = ""
        self.running: set[tuple[int, str]] = set()
        """Process groups and trials."""
        self._servers: set[tuple[int, int]] = set()
        """Parents of the trials, by number and start: fork servers."""

    def read(self, text: str) -> int:
        """Process text from the worker; return the number of complete lines."""
        *lines, self._torn = (self._torn + text).split("\n")
        for line in lines:
            self._read_line(line)
        return len(lines)

    def _read_line(self, line: str) -> None:
        if line.startswith("until "):
            self._until = float(line.removeprefix("until "))
            return
        group, _space, trial_id = line[1:].partition(" ")
        change = self.running.add if line.startswith("+") else self.running.discard
        change((int(group), trial_id))
        server = parent_of(int(group)) if line.startswith("+") else None
        # of an orphan, the parent may be any process
        if server is not None and parent_of(server) == self._worker and (start := start_of(server)) is not None:
            self._servers.add((server, start))

    def left_s(self) -> float:
        """Return the seconds until the lease is over, infinity without a lease."""
        return max(0.0, self._until - boot_time_s())

    def end_overdue(self) -> list[int]:
        """End the trials of a worker whose lease is over; return their processes.

        The trainers and all below them end first, also those that the worker could not report: the search for strays
        reads the environment of every process, which is slow on a busy machine. If the worker goes on meanwhile, it
        writes the deadline of its next lease before it starts a process, which then has to live.
        """
        self._until = math.inf
        family = self._family()
        send(family, signal.SIGKILL)
        groups = {*family, *(pgid for pgid, _trial in self.running)}
        marks = [trial_mark(trial_id) for _pgid, trial_id in self.running]

        def find() -> list[int]:
            strays = [pid for mark in marks for pid in mark.members()]
            members = self._family()
            return sorted({*([] if _has_message() else members), *group_members(*groups), *strays})

        return sorted({*family, *end_all(find, grace_s=0).killed})

    def _family(self) -> list[int]:
        return descendants_of(children_of(self._worker))  # its children are fork servers, and theirs are trainers

    def end_left_behind(self) -> None:
        """End the trials of a dead worker."""
        for pgid, trial_id in self.running:
            end_trial(pgid, trial_id=trial_id, grace_s=0)
            with suppress(OSError):
                short_link(pgid).unlink(missing_ok=True)
        wait_until(lambda: not self._living_servers(), patience_s=_SERVER_PATIENCE_S)  # they end all below them
        end_all(lambda: descendants_of(self._living_servers()), grace_s=0)  # before those who adopt what they leave
        end_all(self._living_servers, grace_s=0)

    def _living_servers(self) -> list[int]:
        return [server for server, start in self._servers if start_of(server) == start]


def main() -> None:
    """Guard the worker whose process id is the first argument until it is dead."""
    for number in (*STOP_SIGNALS, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    watch = Watch(int(sys.argv[1]))
    for text in _messages(watch):
        num_lines = watch.read(text)
        with suppress(OSError):  # the worker died in the meantime
            os.write(1, _ANSWER * num_lines)
    watch.end_left_behind()


def _has_message() -> bool:
    return bool(select.select([0], [], [], 0)[0])


def _messages(watch: Watch) -> Iterator[str]:
    """Yield text from the worker until it is dead; end overdue trials in the meantime."""
    while True:
        left_s = watch.left_s()
        patience_s = None if math.isinf(left_s) else min(left_s, _CHECK_EVERY_S)
        if not select.select([0], [], [], patience_s)[0]:
            if watch.left_s() == 0.0 and (ended := watch.end_overdue()):
                sys.stderr.write(f"guardian: the worker ended nothing when its lease was over; ended {ended} instead\n")
            continue
        data = os.read(0, _READ_BYTES)
        if not data:
            return
        yield data.decode()


if __name__ == "__main__":
    main()
