"""Errors of the worker layer."""


class WorkerError(Exception):
    """The worker cannot go on."""


class SettingsError(WorkerError, ValueError):
    """A setting is missing or still a placeholder."""


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


class ExecRefused(WorkerError):
    """This node does not run this plan, or not into this folder; nothing was run."""
