"""Environment variables that trainers inherit from this process.

Apart from the settings, which need a package that an air-gapped node lacks.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from experiments.runtime.processes import Mark
from kernels import xla_compiler

PEER_SITE = "ABLATE_PEER_SITE"
"""Environment variable that names the folder with the official Mamba-3 kernels; see docs/peer.md."""


def peer_site() -> Path | None:
    """Return the folder with the official kernels and their TileLang, or None when the operator named none."""
    folder = os.environ.get(PEER_SITE)
    return Path(folder).absolute() if folder else None


def state_folder() -> Path:
    """Return the folder in which this machine keeps what outlives a run: ABLATE_HOME, by default ./.ablate."""
    return Path(os.environ.get("ABLATE_HOME") or ".ablate").absolute()


DEVICE_LOCKS = "ABLATE_DEVICE_LOCKS"
"""Environment variable that names the set of device locks. Workers of different sets do not keep each other off a
device: for tests, and for stacks beside each other that measure nothing. "home": each state folder has its own set."""


def lock_scope() -> str:
    """Return the name of the set of device locks that this process belongs to."""
    name = os.environ.get(DEVICE_LOCKS) or "machine"
    return f"home {state_folder().resolve()}" if name == "home" else name


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""CUDA's own variable: the GPUs that this worker and its trainers may use, by index or UUID, separated by commas."""


def visible_gpus() -> tuple[str, ...] | None:
    """Return the names of the GPUs that CUDA may use here, none of them when it may use none; None for all."""
    names = os.environ.get(VISIBLE_GPUS)
    return None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


def trial_mark(trial_id: str) -> Mark:
    """Return the mark of every process below a trial, by which strays are found."""
    return Mark("ABLATE_TRIAL_ID", trial_id)


def mark_process(trial_id: str) -> None:
    """Mark this process and all it will start as belonging to `trial_id`."""
    os.environ.update(trial_mark(trial_id).environment)


def use_environment(needed: Mapping[str, str]) -> None:
    """Set what the node class needs before a tensor is made."""
    os.environ.update(needed)


def compiler_environment(root: Path) -> dict[str, str]:
    """Return the environment of the TPU compiler's process, which finds our packages in `root`.

    Flags are ours and no others, because a receipt names none.
    """
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    library = xla_compiler.library()
    named = {} if library is None else {xla_compiler.LIBRARY_PATH: str(library)}
    path = os.pathsep.join(part for part in (str(root), kept.get("PYTHONPATH", "")) if part)
    return kept | xla_compiler.ENVIRONMENT | named | {"PYTHONPATH": path}


def keep_kernels(folder: Path) -> None:
    """Keep generated GPU kernels in `folder`, so that a node compiles each of them once; the operator's choice wins."""
    os.environ.setdefault("TILELANG_CACHE_DIR", str(folder))


_CACHES = ("TILELANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
"""Where compilers keep what they made."""


def start_cold(folder: Path) -> None:
    """Let every compiler of this process begin with an empty cache below `folder`, whatever the operator chose."""
    for name in _CACHES:
        os.environ[name] = str(folder / name.lower())


def keep_logs_plain() -> None:
    """Keep the profiler's own lines out of the logs of all trials that are forked after this.

    torch reads the variable when it is loaded. Its highest level, 5, is that of a line at each start and stop.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def wait_passively() -> None:
    """Let idle OpenMP threads sleep in every trainer that is forked after this, unless the operator chose otherwise.

    Their default is to spin at barriers: with another process on the same cores, measured steps got 10 to 50 times
    slower. The OpenMP runtime reads the variable when torch is loaded, so the trainer itself would be too late.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
