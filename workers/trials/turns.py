"""Turns of the trials of a block that run in slices: the pipe to the worker, and the processes of a program that wait.

Each side of the pipe sends one byte: "I wait" from the trial, "go on" from the worker. While a program waits, all its
processes are stopped: loaders of data and threads that spin would go on working in the turns of others, and nobody
could tell a program that only says that it waits. Stopping (SIGSTOP) needs no right on the machine, unlike freezing a
control group. A stopped process cannot go on by itself, and the trial's process, which lets it go on, is out of its
reach.
"""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from ablate.experiments.system.processes import family_of, send
from ablate.workers.trials.failures import TOO_LATE

PIPE_BYTE = b"."
"""Every message of a turn. It has no length, on whose rest a reader waits."""
TURN_S = 0.5
"""Turn of a whole process: busy cores change their speed within seconds, and a change of turns costs milliseconds."""
_LOOK_S = 0.001
_RESTING = "TtDZX"
"""States of a thread in /proc. One that waits for a disk, or for a program that it starts, stops when it goes on."""


def yield_to_others(worker: Connection) -> None:
    """Report that this trial waits, and block until the worker lets it go on; exit when the worker is gone."""
    try:
        os.write(worker.fileno(), PIPE_BYTE)
        go_on = os.read(worker.fileno(), 1)
    except OSError:
        go_on = b""
    if not go_on:
        os._exit(TOO_LATE)


@contextmanager
def all_stopped() -> Iterator[None]:
    """Stop all processes below this one, those that they start meanwhile, too; let them go on afterwards.

    A process stops when one of its threads gets a core to take the signal: on a busy machine others run until then, and
    may let a stopped one go on. So all must be at rest in two looks, one after the other.
    """
    stopped: set[int] = set()
    calm = 0
    while calm < 2:
        family = family_of(os.getpid())[1:]
        moving = [pid for pid in family if pid not in stopped or not _is_at_rest(pid)]
        send(moving, signal.SIGSTOP)
        stopped.update(moving)
        calm = 0 if moving else calm + 1
        time.sleep(_LOOK_S if moving else 0)
    yield
    send(stopped, signal.SIGCONT)


def _is_at_rest(pid: int) -> bool:
    """Return whether no thread of a process can run: each is stopped, waits in the kernel, or has ended."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            if thread.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] not in _RESTING:
                return False
    return True


class ProgramTurns:
    """The turns of a program's trial."""

    def __init__(self, worker: Connection, *, by_time: bool) -> None:
        """Begin the first turn; `by_time` if turns end by the clock, and not at marks of the program."""
        self._worker = worker
        self._most_s = TURN_S if by_time else math.inf
        self._began = time.monotonic()
        self.waited_s = 0.0
        """Seconds in which the other trials ran."""

    @property
    def is_over(self) -> bool:
        """Return whether the turn has lasted as long as it may."""
        return time.monotonic() >= self._began + self._most_s

    def wait(self) -> None:
        """Let the other trials run, until the worker lets this one go on."""
        began = time.monotonic()
        yield_to_others(self._worker)
        self._began = time.monotonic()
        self.waited_s += self._began - began
