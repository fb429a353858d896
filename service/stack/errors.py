"""Errors of the embedded stack."""

from service.errors import ServiceError


class StackError(ServiceError):
    """The embedded stack could not do what was asked."""


class StackBusy(StackError):
    """Another `ablate up` holds this home."""


class PartFailed(StackError):
    """A part of the stack ended, or did not answer in time, while the stack was starting."""

    def __init__(self, part: str, what: str, log_tail: str) -> None:
        super().__init__(f"{part} {what}; the end of its log:\n{log_tail or '(the log is empty)'}")
        self.part = part
