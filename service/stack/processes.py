"""The stack's processes: die with the supervisor, carry its mark, stop, and prove that none is left."""

import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.runtime.processes import Mark, die_with_parent, end_all, wait_until
from service.settings import child_environment
from service.stack.parts import StackPart


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
