"""The lease of a block as the worker sees it, and the reasons to stop a trial.

The service may give a block away the moment its lease has run out, so the trial must be gone by then. The worker ends
it a margin earlier, and a guardian that finds it still running half a margin later ends it in the worker's place: a
worker that is frozen ends nothing.
"""

import time
from collections.abc import Callable
from enum import StrEnum

END_S = 5.0
"""What the end of a trial may take: SIGKILL, a driver call that must return first, the driver's own clean-up."""


class StopReason(StrEnum):
    """Why a trial is ended before its time, strongest first."""

    FENCED = "fenced"
    """The lease is lost: another attempt may run this block now."""
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """This worker was asked to go."""
    TIMEOUT = "timeout"


def boot_time_s() -> float:
    """Return seconds since the machine started: nobody can set them, and they count while it is suspended.

    All processes of a machine see the same, which is how a guardian knows its worker's deadline.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def margin_s(lease_s: float) -> float:
    """Return how long before its end a lease counts as lost here; a quarter of a lease that is shorter than 20 s."""
    return min(END_S, lease_s / 4)


def _tell_nobody(_until: float) -> None:
    return


class Lease:
    """Counts down from the moment *before* the last renewal was sent, so it never outlives the service's own count.

    `tell` is called with the moment from which a guardian has to end the trial, now and at every renewal.
    """

    def __init__(
        self,
        lease_s: float,
        *,
        asked_at: float,
        clock: Callable[[], float] = boot_time_s,
        tell: Callable[[float], None] = _tell_nobody,
    ) -> None:
        self._clock = clock
        self._tell = tell
        self._until = asked_at + lease_s - margin_s(lease_s)
        self._revoked = False
        self._cancelled = False
        tell(self._until + margin_s(lease_s) / 2)

    def renew(self, lease_s: float, *, asked_at: float) -> None:
        """Start again with `lease_s`; `asked_at` is when the renewal was sent."""
        until = asked_at + lease_s - margin_s(lease_s)
        if until > self._until:
            self._until = until
            self._tell(until + margin_s(lease_s) / 2)

    def revoke(self) -> None:
        """Note that the service refused the token."""
        self._revoked = True

    def cancel(self) -> None:
        """Note that the service asked to stop."""
        self._cancelled = True

    @property
    def until(self) -> float:
        """Boot time at which this worker must assume that somebody else may own the block soon."""
        return self._until

    def left_s(self) -> float:
        """Seconds until then."""
        return 0.0 if self._revoked else max(0.0, self._until - self._clock())

    def reason(self) -> StopReason | None:
        """Return why the trial must stop now, if it must."""
        if self.left_s() <= 0:
            return StopReason.FENCED
        return StopReason.CANCELLED if self._cancelled else None
