"""One part of a running stack: started, watched, and started again with growing pauses when it ends by itself.

What a part leaves behind (MLflow's main process has a child that goes on answering, a worker has trainers) is ended
before the part starts again: it would hold the port, the files or the device.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from experiments.runtime.processes import Mark, die_with_parent, end_all, send, wait_until
from service.settings import child_environment
from service.stack.layout import StackFiles
from service.stack.parts import StackPart, listeners
from service.stack.state import PartPhase, PartState


def mark(stack_id: str) -> Mark:
    """Return the mark of every process below the supervisor."""
    return Mark("ABLATE_STACK_ID", stack_id)


def part_mark(stack_id: str, part: str) -> Mark:
    """Return the mark of the processes of one part, whoever their parent is by now."""
    return Mark("ABLATE_STACK_PART", f"{stack_id}.{part}")


def start(part: StackPart, *, stack_id: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a part, marked and in a session of its own; the kernel asks it to end when the supervisor dies."""
    marks = {**mark(stack_id).environment, **part_mark(stack_id, part.name).environment}
    with log.open("ab") as sink:
        return subprocess.Popen(
            part.command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment({**part.environment, **marks}, knows=part.knows),
            # the supervisor has one thread, so this is safe
            preexec_fn=partial(die_with_parent, part.stop_signal, parent=os.getpid()),
        )


def members(stack_id: str) -> list[int]:
    """Return the living processes that carry the mark, this one excepted."""
    return mark(stack_id).members()


def end(
    processes: Sequence[subprocess.Popen[bytes]], *, patience_s: float, number: signal.Signals = signal.SIGTERM
) -> None:
    """Send a signal to each process and wait until all have ended or the time is over."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    wait_until(lambda: all(process.poll() is not None for process in processes), patience_s=patience_s)


def kill_members(stack_id: str, *, grace_s: float = 0.0) -> int:
    """End every marked process that is left; return how many had to be killed.

    Raises TimeoutError when one survives SIGKILL (a process inside a driver call).
    """
    ended = end_all(mark(stack_id).members, grace_s=grace_s)
    if ended.survivors:
        raise TimeoutError(f"processes {list(ended.survivors)} survived SIGKILL")
    return ended.killed


STEADY_S = 10.0
"""A part that was ready for so long has started well: its next end is a new trouble, not the same one."""
STEADY_UNHEARD_S = 30.0
"""The same for a part whose answer depends on others: it may be well while they are away."""
MOST_ENDS = 8
"""Ends in a row, none after a steady time, until a part is given up."""
LAST_PAUSE_S = 30.0
"""Pauses grow no longer than this."""
GRACE_S = 10.0
"""For what a part left behind, between SIGTERM and SIGKILL. A worker's guardian ends trainers by itself meanwhile."""

Tell = Callable[[str, str, str], None]
"""Receives a finding: which part, what happened, what follows."""


@dataclass(frozen=True, kw_only=True)
class PartEnd:
    """When what an ended part left is killed, and when the part starts again."""

    kill_at: float
    restart_at: float


class PartRun:
    """The life of one part. Only `look` moves it, so the supervisor stays in one thread."""

    def __init__(self, part: StackPart, files: StackFiles, *, stack_id: str, pause_s: float, tell: Tell) -> None:
        self.part = part
        self.phase = PartPhase.STARTING
        self.pid = 0
        self.started_at = datetime.now(UTC)
        self._files, self._stack_id, self._pause_s, self._tell = files, stack_id, pause_s, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._since = 0.0
        self._restarts = 0
        self._ends = 0
        self._ending: PartEnd | None = None

    @property
    def state(self) -> PartState:
        """What stack.json says of this part."""
        return PartState(phase=self.phase, restarts=self._restarts)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The part's present process, or its last one."""
        if self._process is None:
            raise RuntimeError(f"{self.part.name} was not started")
        return self._process

    def start(self) -> None:
        """Start the part's process."""
        self.started_at = datetime.now(UTC)
        self._process = start(self.part, stack_id=self._stack_id, log=self._files.log(self.part.name))
        self.pid = self._process.pid
        self._enter(PartPhase.STARTING)

    def is_ready(self) -> bool:
        """Tell whether the part answers, by a process of its own; remembers when it began to."""
        if self.phase == PartPhase.STARTING and self.part.answers() and self.owns_port():
            self.confirm()
        return self.phase == PartPhase.READY

    def confirm(self) -> None:
        """Take the part for ready."""
        self._enter(PartPhase.READY)

    def owns_port(self) -> bool:
        """Tell whether the part's port is its own: another process may have taken it after it was found free."""
        return self.part.port is None or bool(listeners(self.part.port).intersection(self._members()))

    def look(self) -> None:
        """Notice what happened to the part and do what is due; waits for nothing but one health check."""
        if self.phase in (PartPhase.RESTARTING, PartPhase.GIVEN_UP):
            self._follow_up()
            return
        code = self.process.poll()
        if code is not None:
            self._ended(how_it_ended(code))
            return
        ready, lasts_s = self.is_ready(), time.monotonic() - self._since
        if (ready and lasts_s > STEADY_S) or (self.part.depends and lasts_s > STEADY_UNHEARD_S):
            self._ends = 0
        elif not ready and not self.part.depends and lasts_s > self.part.patience_s:
            self._ended(f"did not answer within {self.part.patience_s:.0f} s")

    def _ended(self, what: str) -> None:
        now = time.monotonic()
        self._ends += 1
        pause_s = min(LAST_PAUSE_S, self._pause_s * 2.0 ** (self._ends - 1))
        self._ending = PartEnd(kill_at=now + GRACE_S, restart_at=now + pause_s)
        left = self._members()
        send(left, signal.SIGTERM)
        if left:
            what += f" and left {len(left)} behind, which end now"
        if self._ends >= MOST_ENDS:
            self._enter(PartPhase.GIVEN_UP)
            where = self._files.log(self.part.name)
            self._tell(self.part.name, what, f"given up after {self._ends} ends in a row; see {where}")
        else:
            self._enter(PartPhase.RESTARTING)
            self._tell(self.part.name, what, f"starts again after {pause_s:g} s")

    def _follow_up(self) -> None:
        """End what the part left; then, unless it was given up, start it again once the pause is over."""
        if self._ending is None:
            return
        self.process.poll()
        left = self._members()
        if left and time.monotonic() > self._ending.kill_at:
            send(left, signal.SIGKILL)
        if left or time.monotonic() < self._ending.restart_at:
            return
        self._ending = None
        if self.phase == PartPhase.RESTARTING:
            self._restarts += 1
            self._start_again()

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:  # no memory, no process numbers, no space for its log: it may be there later
            self._ended(f"could not be started: {error}")

    def _members(self) -> list[int]:
        return part_mark(self._stack_id, self.part.name).members()

    def _enter(self, phase: PartPhase) -> None:
        self.phase, self._since = phase, time.monotonic()


def how_it_ended(code: int) -> str:
    """Say what an exit code means."""
    if code >= 0:
        return f"ended by itself with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
