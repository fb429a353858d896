"""Process groups: die with the parent, stop a group, prove that it is gone. Linux only (/proc, prctl)."""

import ctypes
import os
import signal
import time
from pathlib import Path

from workers.inherited import TRIAL_MARK

_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.01
_KILL_PATIENCE_S = 10.0
"""How long SIGKILL may take: a process inside a driver call dies only when the call returns."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() == 1:
        os._exit(1)


def group_members(pgid: int) -> list[int]:
    """Return the living processes of a group; zombies hold nothing and do not count."""
    return [pid for pid in _pids() if _group_of(pid) == pgid]


def marked(trial_id: str) -> list[int]:
    """Return living processes started below the trial `trial_id`, whatever group they moved to."""
    mark = f"{TRIAL_MARK}={trial_id}".encode()
    return [pid for pid in _pids() if mark in _environment(pid) and _group_of(pid) is not None]


def stop(pgid: int, *, trial_id: str, grace_s: float) -> list[int]:
    """End a trial: SIGTERM, `grace_s`, SIGKILL, to its group and to strays; return the pids that would not die."""
    if grace_s > 0:
        _signal(group_members(pgid), signal.SIGTERM)
        _wait_gone(pgid, trial_id, grace_s)
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while left := _members(pgid, trial_id):
        if time.monotonic() > deadline:
            return left
        _signal(left, signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)
    return []


def _members(pgid: int, trial_id: str) -> list[int]:
    return sorted({*group_members(pgid), *marked(trial_id)})


def _wait_gone(pgid: int, trial_id: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and _members(pgid, trial_id):
        time.sleep(_LOOK_EVERY_S)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _pids() -> list[int]:
    own = os.getpid()
    names = os.listdir("/proc")  # noqa: PTH208 - called in a tight loop, and Path objects double its cost
    return [int(name) for name in names if name.isdigit() and int(name) != own]


def _group_of(pid: int) -> int | None:
    """Return the process group of a living process, None for zombies and the gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, _parent, group = stat.rpartition(")")[2].split()[:3]
    return None if state in "ZX" else int(group)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
