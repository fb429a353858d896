"""The lease of a block as the worker sees it, and the reasons to stop a trial."""

import time
from collections.abc import Callable
from enum import StrEnum


class StopReason(StrEnum):
    """Why a trial is ended before its time, strongest first."""

    FENCED = "fenced"
    """The lease is lost: another attempt may run this block now."""
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """This worker was asked to go."""
    TIMEOUT = "timeout"


class Lease:
    """Counts down from the moment *before* the last renewal was sent, so it never outlives the service's own count."""

    def __init__(self, lease_s: float, *, asked_at: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = asked_at + lease_s
        self._revoked = False
        self._cancelled = False

    def renew(self, lease_s: float, *, asked_at: float) -> None:
        """Start again with `lease_s`; `asked_at` is when the renewal was sent."""
        self._until = max(self._until, asked_at + lease_s)

    def revoke(self) -> None:
        """Note that the service refused the token."""
        self._revoked = True

    def cancel(self) -> None:
        """Note that the service asked to stop."""
        self._cancelled = True

    def left_s(self) -> float:
        """Seconds until this worker must assume that somebody else owns the block."""
        return 0.0 if self._revoked else max(0.0, self._until - self._clock())

    def reason(self) -> StopReason | None:
        """Return why the trial must stop now, if it must."""
        if self.left_s() <= 0:
            return StopReason.FENCED
        return StopReason.CANCELLED if self._cancelled else None
