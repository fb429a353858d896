"""Classify the failures of trials.

An unexpected Python exception of the training code is a `user_error`: the same arm on the same seed would raise it
again, so a rerun of the block would only waste device time. A failure of the machine (file system, device driver) is
`infra_node`, and the block is rerun.
"""

import errno
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

from ablate.experiments.errors import IsolationFailed
from ablate.experiments.outcomes import FailureClass
from ablate.kernels.errors import KernelUnsupported
from ablate.model.errors import ConfigError, DataError, DatasetDamaged, MeasurementError, NonFiniteLoss, StillCompiling
from ablate.workers.environment_variables import TRIAL_DISK
from ablate.workers.errors import CompilerKilled, DeviceBusy, DeviceMissing, OutputTooLarge

_OOM_PHRASES = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")
_DEVICE_PHRASES = ("cuda error", "cublas_status", "cudnn_status", "nccl error", "nvml", "gloo/transport")
"""In messages about a device, or about a lost connection between ranks."""

_FULL_BYTES = 2**20

_BY_TYPE: tuple[tuple[tuple[type[BaseException], ...], FailureClass], ...] = (
    ((NonFiniteLoss,), FailureClass.NUMERICS),
    ((KernelUnsupported,), FailureClass.GATE_REFUSED),
    ((ConfigError, DataError), FailureClass.USER_ERROR),
    ((OutputTooLarge,), FailureClass.OUTPUT_LIMIT),
    ((StillCompiling,), FailureClass.INVALID_MEASUREMENT),
    (
        (OSError, DatasetDamaged, MeasurementError, DeviceMissing, DeviceBusy, CompilerKilled, IsolationFailed),
        FailureClass.INFRA_NODE,
    ),
)

CANNOT_WRITE = os.EX_IOERR
"""Exit code of a trial that could not write its log or its result."""

TOO_LATE = os.EX_TEMPFAIL
"""Exit code of a trial that did nothing because the lease of its block was already over."""

FORKSERVER_LOST = 255
"""Exit code that multiprocessing reports when the fork server died with the trial."""

MESSAGE_LIMIT = 2000
"""Most characters of a failure's message."""

_OF_THE_NODE = {
    CANNOT_WRITE: "the trial could not write its result: this node's disk is full or broken",
    TOO_LATE: "the trial was started after the end of its lease and did nothing",
    FORKSERVER_LOST: "the fork server died, and the trial with it",
    **{
        -number: f"another process killed the trial ({number.name})"
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    },
}
"""Exit codes whose cause is not the arm."""


def classify(error: BaseException) -> FailureClass:
    """Return the failure class of an exception raised by a trial."""
    if _is_oom(error):
        return FailureClass.OOM
    for kinds, failure in _BY_TYPE:
        if isinstance(error, kinds):
            return failure
    return FailureClass.INFRA_NODE if _is_device_error(error) else FailureClass.USER_ERROR


def describe(error: Exception, *, most_bytes: int) -> tuple[FailureClass, str]:
    """Return class and message of an exception that ended a trial, for its result.

    `most_bytes` is the limit of a file.
    """
    cause = _too_large(error, most_bytes)
    text = f"{type(cause).__name__}: {cause}".encode("utf-8", "backslashreplace")  # halves of undecodable characters
    return classify(cause), text.decode()[:MESSAGE_LIMIT]


def _too_large(error: Exception, most_bytes: int) -> Exception:
    """Return an error that names the limit if `error` is about a file beyond it."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return OutputTooLarge(too_large(most_bytes))
    return error


def too_large(most_bytes: int) -> str:
    """Return a sentence about a file that reached the limit of all files of a trial."""
    return f"a file would have more than {most_bytes / 2**30:g} GiB, the space of a trial's files ({TRIAL_DISK})"


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def classify_exit(
    exit_code: int,
    *,
    oom_kills: int,
    disk_full: bool = False,
    may_kill_itself: bool = False,
    has_own_files: bool = False,
) -> tuple[FailureClass, str]:
    """Return class and message for a trial that ended without a result and that we did not stop.

    Args:
        exit_code: of the process; -N for signal N.
        oom_kills: number of processes in this worker's control group that the OOM killer ended during the trial.
        disk_full: whether the trial's folder has no space left.
        may_kill_itself: whether the trial runs a program that may signal the first process of the trial.
        has_own_files: whether it runs a program that may leave anything in the trial's folder.

    """
    if exit_code == -signal.SIGKILL and oom_kills:
        return FailureClass.OOM, "the kernel's out-of-memory killer ended the trial"
    if exit_code < 0 and may_kill_itself and not disk_full:
        name = signal_name(-exit_code)
        return (
            FailureClass.USER_ERROR,
            f"the trial died of {name}, which its program can send and Ablate did not",
        )
    if has_own_files and not disk_full and exit_code in (0, CANNOT_WRITE):
        return FailureClass.USER_ERROR, "the program left the trial's folder so that it can have no result.json"
    message = _OF_THE_NODE.get(exit_code) or (_OF_THE_NODE[CANNOT_WRITE] if disk_full else None)
    if message is not None:
        return FailureClass.INFRA_NODE, message
    if exit_code < 0:
        return FailureClass.NO_RECEIPT, f"the trial died of {signal_name(-exit_code)} without a result"
    return FailureClass.NO_RECEIPT, f"the trial ended with exit code {exit_code} without a result"


def disk_is_full(folder: Path) -> bool:
    """Return whether `folder` is full, or gone."""
    try:
        return shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:
        return True


def kernel_oom_kills(system: Path = Path("/")) -> int:
    """Return the number of out-of-memory kills among the processes of this worker's control group.

    The group is its systemd unit or its container, and includes its trainers. If the kernel publishes no count for the
    group, the count is the machine's since boot, or 0. `system` is the folder of `proc` and `sys`.
    """
    counts = ""
    with suppress(OSError):
        counts = (system / "proc/vmstat").read_text()
    with suppress(OSError):
        group = (system / "proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        counts = (system / "sys/fs/cgroup" / group / "memory.events").read_text()
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith("oom_kill ")), 0)


def _is_oom(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or "OutOfMemoryError" in _class_names(error):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and names_memory(str(error))


def names_memory(message: str) -> bool:
    """Return whether the message of an exception says that memory is used up."""
    return any(phrase in message.lower() for phrase in _OOM_PHRASES)


def _is_device_error(error: BaseException) -> bool:
    text = str(error).lower()
    kinds = {"AcceleratorError", "DistError"}
    return not kinds.isdisjoint(_class_names(error)) or any(phrase in text for phrase in _DEVICE_PHRASES)


def _class_names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}
