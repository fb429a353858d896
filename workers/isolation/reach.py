"""Isolation of trials on this node: the folders that every trial reads, and whether this machine can isolate.

A node either isolates every trial, or says at its registration, in its log and in `ablate worker doctor` that it
isolates none. See docs/trust.md.
"""

import subprocess
from functools import lru_cache
from pathlib import Path

from ablate.experiments.digest import IMPORT_ROOT, SOURCE_ROOT
from ablate.experiments.system import isolation
from ablate.experiments.system.kernel_limits import can_filter_calls, has_admin, landlock_version
from ablate.experiments.system.processes import OWN_PYTHON
from ablate.workers.environment_variables import library_folders
from ablate.workers.isolation.environment import environment_with_packages

ISOLATED, NOT_ISOLATED = "landlock", "none"
"""Values of a node's version "isolation", which every receipt of the node contains."""
_PACKAGES = ("kernels", "model", "experiments", "workers")


def system_folders() -> tuple[Path, ...]:
    """Return the files and folders that trials read on this machine: the system's, our packages, named libraries."""
    packages = (IMPORT_ROOT / "ablate", *(SOURCE_ROOT / name for name in _PACKAGES))
    return *isolation.system_folders(), *packages, *library_folders()


def isolation_problem() -> str | None:
    """Return why this machine cannot isolate trials, None when it can: a process has tried it."""
    if not landlock_version():
        return "this kernel has no Landlock (Linux 5.13 or newer, with landlock in its list of security modules)"
    if not can_filter_calls():
        return "a filter of system calls is not implemented for the processor of this machine"
    return None if own_tree_problem() is None else _refusal(own_tree=False)


def own_tree_problem() -> str | None:
    """Return why a trial cannot have a file tree of its own here, None when it can: a process has tried it."""
    return _refusal(own_tree=True)


@lru_cache
def _refusal(*, own_tree: bool) -> str | None:
    """Return why a process could not isolate itself, None if it could."""
    fields = "own_tree=True, own_network=True" if own_tree else ""
    program = f"from ablate.experiments.system.isolation import Isolation; Isolation({fields}).enter()"
    environment = environment_with_packages()
    command = [*OWN_PYTHON, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    return None if done.returncode == 0 else f"isolation was refused: {done.stderr.strip().rpartition(': ')[2]}"


def isolation_gaps() -> tuple[str, ...]:
    """Return what this kernel's version of Landlock, and the worker's capabilities, leave open."""
    version = landlock_version()
    gaps = {
        3: "files that the worker may write can be emptied",
        6: "other processes of the worker's user can be sent signals",
    }
    open_gaps = [gap for since, gap in gaps.items() if version < since]
    if (problem := own_tree_problem()) is not None:
        open_gaps.append(
            "trials share /dev/shm, can change modes of this user's files and can use this user's sockets, because they"
            f" get no file tree of their own ({problem}); it needs CAP_SYS_ADMIN or a user namespace"
        )
        open_gaps += [] if has_admin() else ["System V segments and message queues of a trial may outlive it"]
    return tuple(open_gaps)
