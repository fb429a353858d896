"""The stack's processes: die with the supervisor, carry its mark, stop, and prove that none is left. Linux only."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from service.settings import child_environment

STACK_MARK = "ABLATE_STACK_ID"
"""Environment variable that every process below the supervisor inherits, whatever session it moves to."""

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.05
_KILL_PATIENCE_S = 10.0


def start(command: Sequence[str], *, stack_id: str, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a marked process in a session of its own; the kernel sends it SIGTERM when the supervisor dies."""
    with log.open("ab") as sink:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=child_environment({**environment, STACK_MARK: stack_id}),
            preexec_fn=_end_with_parent(os.getpid()),  # the supervisor has one thread, so this is safe
        )


def members(stack_id: str) -> list[int]:
    """Return the living processes that carry the mark, this one excepted; zombies hold nothing and do not count."""
    mark = f"{STACK_MARK}={stack_id}".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - a directory of numbers
    return [pid for pid in pids if pid != os.getpid() and mark in _environment(pid) and is_alive(pid)]


def end(processes: Sequence[subprocess.Popen[bytes]], *, patience_s: float) -> None:
    """Send SIGTERM to each process and wait until all have ended or the time is over."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    wait_until(lambda: all(process.poll() is not None for process in processes), patience_s=patience_s)


def kill_members(stack_id: str, *, grace_s: float = 0.0) -> int:
    """End every marked process that is left; return how many had to be killed.

    Raises TimeoutError when one survives SIGKILL (a process inside a driver call).
    """
    if grace_s > 0:
        _signal(members(stack_id), signal.SIGTERM)
        wait_until(lambda: not members(stack_id), patience_s=grace_s)
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while left := members(stack_id):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {left} survived SIGKILL for {_KILL_PATIENCE_S:.0f} s")
        _signal(left, signal.SIGKILL)
        killed.update(left)
        time.sleep(_LOOK_EVERY_S)
    return len(killed)


def wait_until(condition: Callable[[], bool], *, patience_s: float) -> bool:
    """Look again and again; return whether the condition came true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def is_alive(pid: int) -> bool:
    """Tell whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _end_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)

    def in_child() -> None:
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(1)

    return in_child


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
