"""Errors of the kernel layer."""


class KernelError(Exception):
    """A kernel failed."""


class KernelUnsupported(KernelError):
    """This lane does not implement the requested combination."""


class ShapeError(KernelError, ValueError):
    """A tensor argument has the wrong shape or dtype."""
