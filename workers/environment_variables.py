"""Environment variables that the operator sets, for nodes with and without a service.

The settings are in another module, because they need a package that an air-gapped node lacks.
"""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ablate.kernels.xla import compiler as xla_compiler

PEER_SITE = "ABLATE_PEER_SITE"
"""Environment variable that names the folder with the official Mamba-3 kernels; see docs/peer.md."""


def peer_site() -> Path | None:
    """Return the folder with the official kernels and their TileLang, None when the operator has set none."""
    folder = os.environ.get(PEER_SITE)
    return Path(folder).absolute() if folder else None


def state_folder() -> Path:
    """Return the folder for data that outlives a run on this machine: ABLATE_HOME, by default ./.ablate."""
    return Path(os.environ.get("ABLATE_HOME") or ".ablate").absolute()


def present(names: Iterable[str]) -> dict[str, str]:
    """Return the variables of these names that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


TRIAL_READABLE = "ABLATE_TRIAL_READABLE"
"""Environment variable with files and folders that trials may read beside those that every trial needs, separated by
colons; see docs/trust.md."""


def with_readable(folder: Path) -> str:
    """Return the line that lets trials also read `folder`."""
    parts = [part for part in os.environ.get(TRIAL_READABLE, "").split(os.pathsep) if part]
    return f"{TRIAL_READABLE}={os.pathsep.join([*parts, str(folder)])}"


def library_folders() -> tuple[Path, ...]:
    """Return the files and folders of libraries that the operator has named in any variable."""
    names = [TRIAL_READABLE, "LD_LIBRARY_PATH", "PYTHONPATH", PEER_SITE, "CUDA_HOME", "CUDA_PATH", "ROCM_PATH"]
    named = [part for name in names for part in os.environ.get(name, "").split(os.pathsep) if part]
    library = xla_compiler.library()
    here = Path.cwd()  # Python may have put it into PYTHONPATH, and it may be anything
    folders = [Path(part).absolute() for part in named] + ([library.parent] if library else [])
    return tuple(folder for folder in folders if folder != here)


DEVICE_LOCKS = "ABLATE_DEVICE_LOCKS"
"""Environment variable that names the set of device locks. Workers of different sets may use one device at the same
time: for tests, and for stacks side by side that measure nothing. "home": each state folder has its own set."""


def lock_scope() -> str:
    """Return the name of this process's set of device locks."""
    name = os.environ.get(DEVICE_LOCKS) or "machine"
    return f"home {state_folder().resolve()}" if name == "home" else name


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""CUDA's own variable: the GPUs that this worker and its trainers may use, by index or UUID, separated by commas."""


def visible_gpus() -> tuple[str, ...] | None:
    """Return the names of the GPUs that CUDA may use here: None for all, an empty tuple for none."""
    names = os.environ.get(VISIBLE_GPUS)
    return None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


def hidden_by() -> str | None:
    """Return a variable of ROCm that is set here and hides GPUs from its programs alone, or None."""
    return next((name for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in os.environ), None)


def stack_id() -> str | None:
    """Return the id of the embedded stack that this process is a part of, None for another process."""
    return os.environ.get("ABLATE_STACK_ID")


def allocation_of_cluster() -> str | None:
    """Return the name of the job of Slurm, or of the pod, that this process is a part of; None outside of a cluster."""
    job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{job}_{task}" if job and task else os.environ.get("SLURM_JOB_ID")
    if name:
        return f"slurm-{name}"
    return f"pod-{socket.gethostname()}" if "KUBERNETES_SERVICE_HOST" in os.environ else None


def allocated_nodes() -> int:
    """Return the number of nodes of the Slurm job whose script started this process; 1 elsewhere."""
    return 1 if "SLURM_STEP_ID" in os.environ else int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def slurm_job() -> str:
    """Return the id of the job of Slurm that this process is a part of."""
    return os.environ["SLURM_JOB_ID"]


class SlurmTask(NamedTuple):
    """This process as srun started it."""

    node: str
    number: str
    num_nodes: str
    launcher: str
    """Address of the node on which srun runs."""


def slurm_task() -> SlurmTask:
    """Return which task of srun this process is."""
    names = ("SLURMD_NODENAME", "SLURM_PROCID", "SLURM_NNODES", "SLURM_LAUNCH_NODE_IPADDR")
    return SlurmTask(*(os.environ[name] for name in names))


def named_class() -> str | None:
    """Return the node class that the worker's operator has named."""
    return os.environ.get("ABLATE_NODE_CLASS") or None


def python_environments(pairs: str | None = None) -> dict[str, Path]:
    """Return the folders of Python environments by name from `name=folder` pairs; default: ABLATE_ENVIRONMENTS."""
    text = os.environ.get("ABLATE_ENVIRONMENTS", "") if pairs is None else pairs
    split = (part.strip().partition("=") for part in text.split(",") if part.strip())
    return {name: Path(folder).expanduser() for name, _equals, folder in split}


def secrets_file() -> Path | None:
    """Return the file with the secrets of programs: ABLATE_SECRETS, or `secrets` in the state folder if it exists."""
    named, own = os.environ.get("ABLATE_SECRETS"), state_folder() / "secrets"
    if named:
        return Path(named).expanduser().absolute()
    return own if own.exists() else None


MOST_QUIET_S = 300.0
"""Longest wait for quiet cores before a block that somebody may set."""


def quiet_s(default: float) -> float:
    """Return ABLATE_QUIET_S for a node without a service. Raises ValueError for anything but allowed seconds."""
    text = os.environ.get("ABLATE_QUIET_S", "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_QUIET_S:
        raise ValueError(f"ABLATE_QUIET_S is {text!r}; allowed: 0 to {MOST_QUIET_S:g} seconds")
    return seconds


TRIAL_DISK = "ABLATE_TRIAL_DISK_GIB"
"""Environment variable with the most space of a running trial's files."""


def trial_disk_bytes(default: int) -> int:
    """Return ABLATE_TRIAL_DISK_GIB in bytes for a node without a service. Raises ValueError unless it is above 0."""
    text = os.environ.get(TRIAL_DISK, "").strip()
    try:
        gib = float(text) if text else default / 2**30
    except ValueError:
        gib = 0.0
    if not 0 < gib < 2**30:
        raise ValueError(f"{TRIAL_DISK} is {text!r}; allowed: GiB above 0, such as 16")
    return int(gib * 2**30)


TRIAL_PROCESSES = "ABLATE_TRIAL_PROCESSES"
"""Environment variable with the most processes of a running trial."""


def trial_processes(default: int) -> int:
    """Return ABLATE_TRIAL_PROCESSES for a node without a service. Raises ValueError unless it is a number above 0."""
    text = os.environ.get(TRIAL_PROCESSES, "").strip() or str(default)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**22):
        raise ValueError(f"{TRIAL_PROCESSES} is {text!r}; allowed: 1 to {2**22 - 1}, such as 4096")
    return int(text)


def replace_settings(**values: object) -> None:
    """Let values other than None replace the settings of their names, for this process from now on."""
    chosen = {name: value for name, value in values.items() if value is not None}
    os.environ.update({f"ABLATE_{name.upper()}": str(value) for name, value in chosen.items()})
