"""Isolation of trials on this node: the folders that every trial reads, and whether this machine can isolate.

A node either isolates every trial, or says at its registration, in its log and in `ablate worker doctor` that it
isolates none. See docs/trust.md.
"""

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from experiments.digest import SOURCE_ROOT
from experiments.runtime import isolation
from experiments.runtime.kernel_limits import can_filter_calls, can_own_ipc, landlock_version
from workers.environment_variables import environment_with, library_folders

ISOLATED, NOT_ISOLATED = "landlock", "none"
"""Values of a node's version "isolation", which every receipt of the node contains."""
_PACKAGES = ("kernels", "model", "experiments", "workers")


def system_folders() -> tuple[Path, ...]:
    """Return the files and folders that trials read on this machine: the system's, our packages, named libraries."""
    return *isolation.system_folders(), *(SOURCE_ROOT / name for name in _PACKAGES), *library_folders()


def isolation_problem() -> str | None:
    """Return why this machine cannot isolate trials, None when it can: a process has tried it."""
    if not landlock_version():
        return "this kernel has no Landlock (Linux 5.13 or newer, with landlock in its list of security modules)"
    if not can_filter_calls():
        return "a filter of system calls is not implemented for the processor of this machine"
    return _refusal()


@lru_cache
def _refusal() -> str | None:
    """Return why a process could not isolate itself, None if it could."""
    command = [sys.executable, "-c", "from experiments.runtime.isolation import Isolation; Isolation().enter()"]
    environment = environment_with(SOURCE_ROOT)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    return None if done.returncode == 0 else f"isolation was refused: {done.stderr.strip().rpartition(': ')[2]}"


def isolation_gaps() -> tuple[str, ...]:
    """Return what this kernel's version of Landlock, and the worker's capabilities, leave open."""
    version = landlock_version()
    gaps = {
        3: "files that the worker may write can be emptied",
        6: "other processes of the worker's user can be sent signals",
    }
    left = () if can_own_ipc() else ("System V segments and message queues of a trial may outlive it",)
    return (*(gap for since, gap in gaps.items() if version < since), *left)
