"""The processes of the stack's parts: start, watch and restart one part, and end every process of the stack.

A part that ends by itself restarts after a growing pause. Processes that it left behind end first, because they hold
its port, files or device: a worker has trainers.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ablate.experiments.system.processes import Mark, die_with_parent, end_all, send, wait_until
from ablate.service.settings import child_environment
from ablate.service.stack.layout import StackFiles
from ablate.service.stack.parts import StackPart, listeners
from ablate.service.stack.state import PartPhase, PartState

STEADY_S = 10.0
"""After so long as ready, the next failure of a part counts as the first one again."""
STEADY_DEPENDENT_S = 30.0
"""The same for a part whose answer depends on other parts. It may be fine while those are down."""
MAX_FAILURES = 8
"""Failures in a row, without a steady time between them, until a part is given up."""
MAX_PAUSE_S = 30.0
"""The longest pause before a restart."""
GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL for processes that a part left. A worker's guardian ends the trainers meanwhile."""

AddFinding = Callable[[str, str, str], None]
"""Receives a finding: the part, the event, the consequence."""


def stack_mark(stack_id: str) -> Mark:
    """Return the mark of every process below the supervisor."""
    return Mark("ABLATE_STACK_ID", stack_id)


def part_mark(stack_id: str, part: str) -> Mark:
    """Return the mark of one part's processes. They keep it when their parent dies."""
    return Mark("ABLATE_STACK_PART", f"{stack_id}.{part}")


def start(part: StackPart, *, stack_id: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a part with its marks, in its own session. The kernel signals it when the supervisor dies."""
    own_marks = (stack_mark(stack_id), part_mark(stack_id, part.name))
    marks = {mark.variable: mark.value for mark in own_marks}
    with log.open("ab") as sink:
        return subprocess.Popen(
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment({**part.environment, **marks}, knows=part.secrets, is_ours=part.is_ours),
            # safe, because the supervisor has one thread
            preexec_fn=partial(die_with_parent, part.stop_signal, parent=os.getpid()),
        )


def end(
    processes: Sequence[subprocess.Popen[bytes]], *, patience_s: float, number: signal.Signals = signal.SIGTERM
) -> None:
    """Signal each process, and wait up to `patience_s` seconds until all have ended."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    wait_until(lambda: all(process.poll() is not None for process in processes), patience_s=patience_s)


def kill_members(stack_id: str, *, grace_s: float = 0.0) -> int:
    """End every process with the stack's mark, and return how many needed SIGKILL.

    Raises TimeoutError if one survives SIGKILL (a process inside a driver call).
    """
    result = end_all(stack_mark(stack_id).members, grace_s=grace_s)
    if result.survivors:
        raise TimeoutError(f"processes {list(result.survivors)} survived SIGKILL")
    return len(result.killed)


class PartRun:
    """The life of one part. Only `update` moves it, so the supervisor needs one thread."""

    def __init__(
        self, part: StackPart, files: StackFiles, *, stack_id: str, pause_s: float, add_finding: AddFinding
    ) -> None:
        self.part = part
        self.phase = PartPhase.STARTING
        self.pid = 0
        self.started_at = datetime.now(UTC)
        self._files, self._stack_id, self._pause_s, self._add_finding = files, stack_id, pause_s, add_finding
        self._process: subprocess.Popen[bytes] | None = None
        self._phase_began = 0.0
        self._restarts = 0
        self._failures = 0
        self._cleaned = True
        self._kill_at = self._restart_at = 0.0

    @property
    def state(self) -> PartState:
        """The part's state for stack.json."""
        return PartState(phase=self.phase, restarts=self._restarts)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The part's current process, or its last one."""
        if self._process is None:
            raise RuntimeError(f"{self.part.name} was not started")
        return self._process

    def start(self) -> None:
        """Start the part's process."""
        self.started_at = datetime.now(UTC)
        self._process = start(self.part, stack_id=self._stack_id, log=self._files.log(self.part.name))
        self.pid = self._process.pid
        self._enter(PartPhase.STARTING)

    def confirm(self) -> None:
        """Mark the part as ready."""
        self._enter(PartPhase.READY)

    def owns_port(self) -> bool:
        """Return whether the part listens on its port. Another process may have taken the free port first."""
        return self.part.port is None or bool(listeners(self.part.port).intersection(self._members()))

    def lost_port(self) -> bool:
        """Return whether another process listens on the part's port."""
        return self.part.port is not None and not self.owns_port() and bool(listeners(self.part.port))

    def update(self) -> None:
        """Check the part and do the next step. This blocks for one health check at most, while the part starts."""
        if self.phase in (PartPhase.RESTARTING, PartPhase.GIVEN_UP):
            self._clean_up_and_restart()
            return
        code = self.process.poll()
        if code is not None:
            self._fail(describe_exit(code))
            return
        if self.phase == PartPhase.STARTING and self.part.answers() and self.owns_port():
            self.confirm()
        ready, lasted_s = self.phase == PartPhase.READY, time.monotonic() - self._phase_began
        starts = self.part.depends and self.phase == PartPhase.STARTING
        if (ready and lasted_s > STEADY_S) or (starts and lasted_s > STEADY_DEPENDENT_S):
            self._failures = 0
        elif self.phase == PartPhase.STARTING and not self.part.depends and lasted_s > self.part.patience_s:
            self._fail(f"did not answer within {self.part.patience_s:.0f} s")

    def _fail(self, event: str) -> None:
        self._failures += 1
        pause_s = min(MAX_PAUSE_S, self._pause_s * 2.0 ** (self._failures - 1))
        self._cleaned = False
        self._kill_at, self._restart_at = time.monotonic() + GRACE_S, time.monotonic() + pause_s
        orphans = self._members()
        send(orphans, signal.SIGTERM)
        if self.pid in orphans:
            event += "; its processes end now"
        elif orphans:
            event += f" and left {len(orphans)} running, which end now"
        if self._failures >= MAX_FAILURES:
            self._enter(PartPhase.GIVEN_UP)
            log = self._files.log(self.part.name)
            self._add_finding(self.part.name, event, f"given up after {self._failures} failures in a row; see {log}")
        else:
            self._enter(PartPhase.RESTARTING)
            self._add_finding(self.part.name, event, f"restarts after {pause_s:g} s")

    def _clean_up_and_restart(self) -> None:
        """End the processes that the part left. Then restart it after the pause, unless it is given up."""
        if self._cleaned:
            return
        self.process.poll()
        orphans = self._members()
        if orphans and time.monotonic() > self._kill_at:
            send(orphans, signal.SIGKILL)
        if orphans or time.monotonic() < self._restart_at:
            return
        self._cleaned = True
        if self.phase == PartPhase.RESTARTING:
            self._restarts += 1
            try:
                self.start()
            except OSError as error:  # no memory, process number or disk space now; a later try may succeed
                self._fail(f"could not start: {error}")

    def _members(self) -> list[int]:
        return part_mark(self._stack_id, self.part.name).members()

    def _enter(self, phase: PartPhase) -> None:
        self.phase, self._phase_began = phase, time.monotonic()


def describe_exit(code: int) -> str:
    """Return a description of a process's exit code, for example "was ended by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
