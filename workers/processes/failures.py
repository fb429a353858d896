"""Sort what went wrong in a trial into the closed list of failure classes.

An unexpected Python exception of the training code counts as `user_error`: the same arm on the same seed would raise
it again, so rerunning the block would only burn device time. What speaks of the machine (file system, device driver)
is `infra_node`, and the block is rerun.
"""

import errno
import os
import shutil
import signal
from pathlib import Path

from experiments.outcomes import FailureClass, Outcome
from kernels.errors import KernelUnsupported
from model.errors import ConfigError, DataError, MeasurementError, NonFiniteLoss, StillCompiling
from workers.errors import CompilerKilled, DeviceBusy, DeviceMissing

_OOM_PHRASES = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
_DEVICE_PHRASES = ("cuda error", "cublas_status", "cudnn_status", "nccl error", "nvml")

_FULL_BYTES = 2**20

_OUTCOMES = {
    FailureClass.OOM: Outcome.OOM,
    FailureClass.TIMEOUT: Outcome.TIMEOUT,
    FailureClass.GATE_REFUSED: Outcome.REFUSED,
    FailureClass.INVALID_MEASUREMENT: Outcome.INVALID,
}

_BY_TYPE: tuple[tuple[tuple[type[BaseException], ...], FailureClass], ...] = (
    ((NonFiniteLoss,), FailureClass.NUMERICS),
    ((KernelUnsupported,), FailureClass.GATE_REFUSED),
    ((ConfigError, DataError), FailureClass.USER_ERROR),
    ((StillCompiling,), FailureClass.INVALID_MEASUREMENT),
    ((OSError, MeasurementError, DeviceMissing, DeviceBusy, CompilerKilled), FailureClass.INFRA_NODE),
)

CANNOT_WRITE = os.EX_IOERR
"""Exit code of a trial that could not write its log or its result."""

TOO_LATE = os.EX_TEMPFAIL
"""Exit code of a trial that was started when the lease of its block was over, and did nothing."""

FORKSERVER_LOST = 255
"""Exit code that multiprocessing reports when the fork server died with the trial."""


_OF_THE_NODE = {
    CANNOT_WRITE: "the trial could not write its result: this node's disk is full or broken",
    TOO_LATE: "the trial was started after the end of its lease, and did nothing",
    FORKSERVER_LOST: "the trial was lost together with the fork server",
    **{
        -number: f"the trial was killed from outside ({number.name})"
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    },
}
"""Exit codes that say nothing about the arm."""


def classify(error: BaseException) -> FailureClass:
    """Return the failure class of an exception raised by a trial."""
    if _is_oom(error):
        return FailureClass.OOM
    for kinds, failure in _BY_TYPE:
        if isinstance(error, kinds):
            return failure
    return FailureClass.INFRA_NODE if _is_device_error(error) else FailureClass.USER_ERROR


def outcome_of(failure: FailureClass) -> Outcome:
    """Return the outcome that a receipt shows for a failure class."""
    return _OUTCOMES.get(failure, Outcome.FAILED)


def classify_exit(exit_code: int, *, oom_kills: int, disk_full: bool = False) -> tuple[FailureClass, str]:
    """Classify a trial that ended without a result and that we did not stop.

    Args:
        exit_code: of the process; -N for signal N.
        oom_kills: how many processes of this worker's control group the OOM killer ended while the trial ran.
        disk_full: whether the trial's folder has no space left.

    """
    if exit_code == -signal.SIGKILL and oom_kills:
        return FailureClass.OOM, "the kernel's out-of-memory killer ended the trial"
    known = _OF_THE_NODE.get(exit_code)
    if known is not None:
        return FailureClass.INFRA_NODE, known
    if disk_full:
        return FailureClass.INFRA_NODE, _OF_THE_NODE[CANNOT_WRITE]
    if exit_code < 0:
        return FailureClass.NO_RECEIPT, f"the trial died of {signal.Signals(-exit_code).name} without a result"
    return FailureClass.NO_RECEIPT, f"the trial ended with exit code {exit_code} and left no result"


def disk_is_full(folder: Path) -> bool:
    """Tell whether nothing can be written in `folder` any more."""
    try:
        return shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:
        return True


def kernel_oom_kills(system: Path = Path("/")) -> int:
    """Return how often the kernel's out-of-memory killer struck among this worker's processes, its trainers included.

    Those are the processes of its control group: its unit, or its container. Where that is not counted, the machine's
    are, since boot; 0 where nothing is published. `system` is where `proc` and `sys` are.
    """
    try:
        group = (system / "proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        counts = (system / "sys/fs/cgroup" / group / "memory.events").read_text()
    except OSError:
        counts = _text(system / "proc/vmstat")
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith("oom_kill ")), 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_oom(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or "OutOfMemoryError" in _class_names(error):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _OOM_PHRASES)


def _is_device_error(error: BaseException) -> bool:
    text = str(error).lower()
    return "AcceleratorError" in _class_names(error) or any(phrase in text for phrase in _DEVICE_PHRASES)


def _class_names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}
