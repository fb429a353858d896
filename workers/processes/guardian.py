"""The worker's end of its guardian: what it is told, and another one in its place when it is dead or frozen.

What a guardian does: workers/processes/guardian_process.py.
"""

import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from experiments.runtime.processes import end_all, group_members
from workers.environment_variables import trial_mark

_log = logging.getLogger(__name__)

_MODULE = "workers.processes.guardian_process"
_ANSWER_PATIENCE_S = 10.0
"""A guardian that has not answered a line for so long counts as frozen; its start takes most of a second."""
_END_PATIENCE_S = 5.0


class Guardian:
    """Starts a guardian, tells it of trials and leases, and replaces it when it is not there any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}
        """Process group by trial."""
        self._until = math.inf
        self._line: _Line | None = None
        self._start()

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._line is not None:
                self._line.close()

    def watch(self, pgid: int, trial_id: str) -> None:
        """End this trial's processes when the worker dies, or when its lease is over."""
        with self._lock:
            self._running[trial_id] = pgid
            self._tell(f"+{pgid} {trial_id}")

    def forget(self, pgid: int, trial_id: str) -> None:
        """Stop watching a trial that has ended: its group's number may be used again."""
        with self._lock:
            self._running.pop(trial_id, None)
            self._tell(f"-{pgid} {trial_id}")

    def until(self, boot_time_s: float) -> None:
        """End every trial that still runs at this moment, unless another moment is told before."""
        with self._lock:
            self._until = boot_time_s
            self._tell(f"until {boot_time_s!r}")

    def check(self) -> None:
        """Make sure that a guardian is there and listens. Raises OSError when none can be started."""
        with self._lock:
            problem = "is not there" if self._line is None else self._line.problem()
            if problem is not None:
                _log.error("the guardian %s; another one is started", problem)
                if self._line is not None:
                    self._line.kill()
                self._line = None
                self._start()

    def _start(self) -> None:
        self._line = _Line()
        self._tell(f"until {self._until!r}")
        for trial_id, pgid in self._running.items():
            self._tell(f"+{pgid} {trial_id}")

    def _tell(self, line: str) -> None:
        if self._line is not None:
            self._line.tell(line)


class _Line:
    """A guardian process and the two pipes to it."""

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(os.getpid())], stdin=theirs, stdout=answers, start_new_session=True
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
        self._asked: deque[float] = deque()
        """When each line was written that is not answered yet."""

    def tell(self, line: str) -> None:
        """Write one line; one that cannot be written shows in `problem`, and the next guardian is told everything."""
        self._asked.append(time.monotonic())
        with suppress(BrokenPipeError, BlockingIOError):
            os.write(self._pipe, f"{line}\n".encode())

    def problem(self) -> str | None:
        """Return what keeps this guardian from its work, None when nothing does."""
        if self._process.poll() is not None:
            return f"{self._process.pid} died"
        with suppress(BlockingIOError):
            for _ in os.read(self._answers, max(1, len(self._asked))):
                self._asked.popleft()
        frozen = bool(self._asked) and time.monotonic() - self._asked[0] > _ANSWER_PATIENCE_S
        return f"{self._process.pid} does not answer" if frozen else None

    def close(self) -> None:
        """Let it end what was left, and then itself."""
        os.close(self._pipe)
        os.close(self._answers)
        try:
            self._process.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it before its pipe: one that is only slow would take the end of the pipe for its worker's death."""
        self._process.kill()
        self._process.wait()
        os.close(self._pipe)
        os.close(self._answers)


def end_trial(pgid: int, *, trial_id: str, grace_s: float, leader: Callable[[], bool] | None = None) -> tuple[int, ...]:
    """End a trial's group and the strays that left it: SIGTERM, `grace_s`, SIGKILL; return who would not die.

    A trial that has just been forked has no group of its own yet. `leader` tells whether the trial's own process is
    known to live, and then it counts whatever group it is in.
    """
    mark = trial_mark(trial_id)

    def find() -> list[int]:
        first = {pgid} if leader is not None and leader() else set()
        return sorted(first | {*group_members(pgid), *mark.members()})

    return end_all(find, grace_s=grace_s).survivors
