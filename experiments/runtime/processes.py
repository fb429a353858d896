"""Processes by what the kernel says of them: die with the parent, find by mark or group, end, prove. Linux only.

Serves the embedded stack and the workers, a worker's guardian among them: standard library only.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded here, because a child between fork and exec must load nothing."""
_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.02
_KILL_PATIENCE_S = 10.0
"""How long SIGKILL may take: a process inside a driver call dies only when the call returns."""
_EXEC_PATIENCE_S = 2.0
"""How long a process may be between two programs: it has no environment until the kernel has laid out the new one."""


@dataclass(frozen=True)
class Mark:
    """An environment variable that every process below one inherits, whatever group or session it moves to."""

    variable: str
    value: str

    @property
    def environment(self) -> dict[str, str]:
        """What to add to the environment of a process that is to carry the mark."""
        return {self.variable: self.value}

    def members(self) -> list[int]:
        """Return the living processes, this one excepted, that were started with the mark."""
        entry = f"{self.variable}={self.value}".encode()
        return [pid for pid in _others() if entry in _environment(pid) and is_alive(pid)]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What it took to end processes."""

    killed: int
    """How many were sent SIGKILL."""
    survivors: tuple[int, ...]
    """Those that live on nevertheless."""


def die_with_parent(number: signal.Signals = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Ask the kernel to send `number` to this process when the thread that started it ends.

    With the number of the `parent`, end at once if it is not the parent any more. Without it nothing is checked: an
    orphan may be adopted by any process, and the parent may be process 1 of a container.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def group_members(pgid: int) -> list[int]:
    """Return the living processes of a group, this one excepted."""
    return [pid for pid in _others() if _group_of(pid) == pgid]


def children_of(pid: int) -> list[int]:
    """Return the living processes that `pid` is the parent of, this one excepted."""
    return [other for other in _others() if (place := _place_of(other)) is not None and place[0] == pid]


def command_of(pid: int) -> str:
    """Return the command line of a process, empty when it is gone or hidden."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Tell whether the process exists and is no zombie: those hold nothing and do not count."""
    return _group_of(pid) is not None


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_all(find: Callable[[], Sequence[int]], *, grace_s: float) -> Ended:
    """End what `find` finds: SIGTERM, up to `grace_s` (0: not asked at all), then SIGKILL until it finds none."""
    if grace_s > 0:
        send(find(), signal.SIGTERM)
        wait_until(lambda: not find(), patience_s=grace_s)
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while (left := find()) and time.monotonic() <= deadline:
        send(left, signal.SIGKILL)
        killed.update(left)
        time.sleep(_LOOK_EVERY_S)
    return Ended(killed=len(killed), survivors=tuple(left))


def wait_until(condition: Callable[[], bool], *, patience_s: float) -> bool:
    """Look again and again; return whether the condition came true in time."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _others() -> list[int]:
    own = os.getpid()
    names = os.listdir("/proc")  # noqa: PTH208 - called in a tight loop, and Path objects double its cost
    return [int(name) for name in names if name.isdigit() and int(name) != own]


def _group_of(pid: int) -> int | None:
    """Return the process group of a living process, None for zombies and the gone."""
    place = _place_of(pid)
    return None if place is None else place[1]


def _place_of(pid: int) -> tuple[int, int] | None:
    """Return (parent, process group) of a living process, None for zombies and the gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, group = stat.rpartition(")")[2].split()[:3]
    return None if state in "ZX" else (int(parent), int(group))


def _environment(pid: int) -> list[bytes]:
    """Return the variables that a process was started with."""
    path, deadline = Path(f"/proc/{pid}/environ"), time.monotonic() + _EXEC_PATIENCE_S
    try:
        found = path.read_bytes()
        while not found and _is_between_programs(pid) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S / 10)
        return (found or path.read_bytes()).split(b"\0")
    except OSError:
        return []


def _is_between_programs(pid: int) -> bool:
    """Tell whether the process is inside exec: it has memory (kernel threads and zombies have none), no environment."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    # proc(5) numbers vsize 23 and env_end 51, from 1; number and name are cut off here: 3 less
    size, environment_end = int(fields[20]), int(fields[48])
    return size > 0 and environment_end == 0
