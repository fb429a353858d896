"""Errors of the worker layer."""

from experiments.outcomes import FailureClass
from workers.lease import StopReason


class WorkerError(Exception):
    """The worker cannot go on."""


class SettingsError(WorkerError, ValueError):
    """A setting is missing or still a placeholder."""


class DeviceMissing(WorkerError):
    """The device that was asked for is not here, or cannot be used."""


class DeviceBusy(WorkerError):
    """Another worker or trainer has the device; allowed is one of each."""


class DeviceUnknown(WorkerError):
    """The driver does not tell what the device holds."""


class PreloadError(WorkerError):
    """The fork server could not import what trials need."""


class ApiUnreachable(WorkerError):
    """The service did not answer; asking again later may help."""


class ApiRefused(WorkerError):
    """The service answered that the request is wrong; asking again does not help."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the service answered {status}: {detail}")
        self.status = status
        self.detail = detail


class StaleLease(WorkerError):
    """Another attempt owns this block, or the ablation is over: whatever this attempt knows does not count."""


class NodeKeyError(WorkerError):
    """The private key of this node cannot be read, or is not kept safely."""


class InstallRefused(WorkerError):
    """The worker cannot be installed as it was asked for."""


class ExecRefused(WorkerError):
    """This node does not run this plan, or not into this folder; nothing was run."""


class CompilerFailed(WorkerError):
    """The TPU compiler gave no answer, or refused a step for another reason than memory."""


class CompilerKilled(CompilerFailed):
    """The TPU compiler's process was killed from outside: most likely this machine has too little memory for it."""


class BlockBroken(WorkerError):
    """A trial tells nothing about its arm yet: the block is discarded and rerun whole.

    `arm` is the one whose trial ended it, None where it cannot be told.
    """

    def __init__(self, failure_class: FailureClass, message: str, *, arm: str | None = None) -> None:
        super().__init__(message)
        self.failure_class = failure_class
        self.message = message
        self.arm = arm


class BlockStopped(WorkerError):
    """The block was ended from outside, for `reason`."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason
