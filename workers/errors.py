"""Errors of the worker layer."""

from ablate.experiments.outcomes import FailureClass
from ablate.workers.lease import StopReason


class WorkerError(Exception):
    """The worker cannot go on."""


class SettingsError(WorkerError, ValueError):
    """A setting is missing or still a placeholder."""


class DeviceMissing(WorkerError):
    """This machine lacks the requested device, or cannot use it."""


class DeviceBusy(WorkerError):
    """Another worker or trainer uses the device; allowed is one of each."""


class DeviceUnknown(WorkerError):
    """The driver does not report the state of the device."""


class SoftwareChanged(WorkerError):
    """Code or versions changed after the start of this worker, so its receipts would name the wrong ones."""


class PreloadError(WorkerError):
    """The fork server could not import the packages that trials need."""


class ApiUnreachable(WorkerError):
    """The service did not answer; a later call may succeed."""


class ApiRefused(WorkerError):
    """The service rejected the request; a repetition cannot succeed."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the service answered {status}: {detail}")
        self.status = status
        self.detail = detail


class StaleLease(WorkerError):
    """Another attempt owns this block, or the ablation is over: the results of this attempt do not count."""


class AllocationUnfit(WorkerError):
    """The nodes of this worker's allocation cannot run one trial together."""


class NodeKeyError(WorkerError):
    """The private key of this node cannot be read, or its file is not safe."""


class InstallRefused(WorkerError):
    """The worker cannot be installed with these options."""


class ExecRefused(WorkerError):
    """This node cannot run this plan, or cannot write to this folder; nothing has run."""


class CompilerFailed(WorkerError):
    """The TPU compiler gave no answer, or rejected a step for a reason other than memory."""


class CompilerKilled(CompilerFailed):
    """Another process killed the TPU compiler: most likely this machine has too little memory for it."""


class OutputTooLarge(WorkerError):
    """A trial wrote a file beyond the limit, such as an endless log."""


class BlockBroken(WorkerError):
    """A trial yields no result for its arm yet: the block is discarded and rerun whole.

    `arm` is the arm of that trial, None where it is unknown.
    """

    def __init__(self, failure_class: FailureClass, message: str, *, arm: str | None = None) -> None:
        super().__init__(message)
        self.failure_class = failure_class
        self.message = message
        self.arm = arm


class BlockStopped(WorkerError):
    """The block was stopped from outside, for `reason`."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason
