"""The environment of a node's processes: what programs and trainers inherit, and what is hidden from them."""

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from ablate.experiments.digest import IMPORT_ROOT
from ablate.experiments.system.processes import Mark
from ablate.kernels.xla import compiler as xla_compiler
from ablate.workers.environment_variables import VISIBLE_GPUS, visible_gpus

_SECRETS = re.compile(r"ABLATE_.*(TOKEN|SECRET|URL)|MLFLOW_TRACKING_.*|PG(PASSWORD|PASSFILE|SERVICEFILE)|REDISCLI_AUTH")
"""Variables with secrets of the service, and with addresses that may contain one."""


def hide_secrets() -> None:
    """Remove the service's secrets from the environment of every process that starts later, trials among them.

    Settings are read before that. The kernel shows other processes of this user the memory with the environment of this
    one, so the secrets are overwritten there.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    for name in [name for name in os.environ if _SECRETS.fullmatch(name)]:
        if address := getenv(os.fsencode(name)):
            ctypes.memset(address, ord("-"), len(os.environb[os.fsencode(name)]))
        del os.environ[name]


_FOR_PROGRAMS = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LC_.*|TZ|TMPDIR|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)|ABLATE_TRIAL_ID|"
    "(OMP|KMP|MKL|OPENBLAS|NUMEXPR|NCCL|NVSHMEM|GLOO|CUDA|NVIDIA|TORCH|PYTORCH|KINETO)_.*"
)
"""Variables of the worker that a program of a user gets. Others may contain keys of the operator."""


def outside_variables(*, devices: int) -> dict[str, str]:
    """Return the environment for a program of a user on `devices` GPUs, 0 for none.

    Only variables without secrets are in it, and no cache of a compiler, because a command may not write into one.
    The program sees the first GPUs of this worker only.
    """
    names = (name for name in os.environ if _FOR_PROGRAMS.fullmatch(name) and name not in _CACHES)
    variables = {name: os.environ[name] for name in names}
    gpus = visible_gpus()
    own = map(str, range(devices)) if gpus is None else gpus[:devices]
    return {**variables, VISIBLE_GPUS: ",".join(own)}


def trial_mark(trial_id: str) -> Mark:
    """Return the mark of every process of a trial, which identifies stray processes."""
    return Mark("ABLATE_TRIAL_ID", trial_id)


def mark_process(trial_id: str) -> None:
    """Mark this process, and all processes that it will start, as part of `trial_id`."""
    os.environ.update(trial_mark(trial_id).environment)


def use_environment(variables: Mapping[str, str]) -> None:
    """Set the variables of a node class; call it before a tensor exists."""
    os.environ.update(variables)


def meet_on_this_machine() -> None:
    """Let the ranks of a trial talk over the loopback device; the host's name may have no address."""
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"})


def compiler_environment() -> dict[str, str]:
    """Return the environment of the TPU compiler's process, which imports our packages.

    The operator's XLA flags are left out, because a receipt records no flags.
    """
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    library = xla_compiler.library()
    library_path = {} if library is None else {xla_compiler.LIBRARY_PATH: str(library)}
    return variables | xla_compiler.ENVIRONMENT | library_path | {"PYTHONPATH": _python_path()}


def environment_with_packages() -> dict[str, str]:
    """Return this environment for a program that imports our packages."""
    return {**os.environ, "PYTHONPATH": _python_path()}


def _python_path() -> str:
    return os.pathsep.join(part for part in (str(IMPORT_ROOT), os.environ.get("PYTHONPATH", "")) if part)


_CACHES = (
    "TILELANG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
)
"""Cache folders of compilers."""


_CACHE_SWITCHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
"""FlashAttention-4 keeps its kernels in memory only, unless this is set."""


def chosen_caches() -> dict[str, str]:
    """Return the cache folders of compilers that the operator has chosen, by their variables.

    The worker asks before it starts a trial: where torch is imported, torch may have set a variable itself.
    """
    return {name: os.environ[name] for name in _CACHES if os.environ.get(name)}


def keep_kernels(folder: Path, chosen: Mapping[str, str]) -> None:
    """Cache compiled code below `folder`, so that a node compiles it only once; what the operator has `chosen` wins.

    The caller names the folder after the versions of all compilers: the keys of TileLang leave out nvcc's version, and
    those of torch.compile leave out the C++ compiler's.
    """
    os.environ.update({name: chosen.get(name, str(folder / name.lower())) for name in _CACHES} | _CACHE_SWITCHES)


def start_cold(folder: Path) -> None:
    """Give every compiler of this process an empty cache below `folder`, regardless of the operator's choice."""
    keep_kernels(folder, chosen={})


def compile_in_process() -> None:
    """Let torch's compiler generate code in this process only.

    Its helper processes start CUDA, which an isolated trial of root does not let them. It reads the variable when it is
    imported, which the fork server may have done.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if settings := sys.modules.get("torch._inductor.config"):
        settings.compile_threads = 1  # type: ignore[attr-defined]


def keep_logs_plain() -> None:
    """Suppress the profiler's own log lines in every trial that is forked later.

    torch reads the variable when it is imported. The profiler's highest level, 5, logs each start and stop.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def wait_passively() -> None:
    """Let idle OpenMP threads sleep in every trainer that is forked later, unless the operator chose otherwise.

    By default they spin at barriers: with another process on the same cores, measured steps got 10 to 50 times slower.
    The OpenMP runtime reads the variable when torch is imported, so the trainer itself could set it only too late.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
