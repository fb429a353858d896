"""The lease of a block as the worker sees it, and the reasons to stop a trial.

The service may give a block to another worker the moment its lease has run out, so the trial must be gone by then. The
worker ends it a margin earlier. If the worker is frozen, a guardian ends the trial half a margin later.
"""

import time
from collections.abc import Callable
from enum import StrEnum

END_S = 5.0
"""Time that the end of a trial may take: SIGKILL, the return of a driver call, the driver's own clean-up."""


class StopReason(StrEnum):
    """Why a trial is stopped early, strongest reason first."""

    FENCED = "fenced"
    """The lease is lost: another attempt may run this block now."""
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    """This worker has to end."""
    OUTPUT_LIMIT = "output limit"
    """Its files use more space than a trial may use."""
    PROCESS_LIMIT = "process limit"
    """It has more processes or threads than a trial may have."""
    TIMEOUT = "timeout"


def boot_time_s() -> float:
    """Return the seconds since the machine started.

    Nobody can set this clock, and it runs while the machine is suspended. It is the same in all processes of a machine,
    so that a guardian can use its worker's deadline.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def margin_s(lease_s: float) -> float:
    """Return how long before its end a lease counts as lost here: a quarter of a lease that is shorter than 20 s."""
    return min(END_S, lease_s / 4)


def _ignore(_until: float) -> None:
    return


class Lease:
    """A countdown from the moment *before* a renewal is sent, so that it never outlives the service's own countdown.

    `on_deadline` is called now and at every renewal with the boot time from which a guardian has to end the trial.
    """

    def __init__(
        self,
        lease_s: float,
        *,
        sent_at: float,
        clock: Callable[[], float] = boot_time_s,
        on_deadline: Callable[[float], None] = _ignore,
    ) -> None:
        self._clock = clock
        self._on_deadline = on_deadline
        self._revoked = False
        self._cancelled = False
        self.until = float("-inf")
        """Boot time from which this worker must assume that another worker may run the block soon."""
        self.renew(lease_s, sent_at=sent_at)

    def renew(self, lease_s: float, *, sent_at: float) -> None:
        """Extend the lease by a renewal that was sent at `sent_at`; an earlier end changes nothing."""
        until = sent_at + lease_s - margin_s(lease_s)
        if until > self.until:
            self.until = until
            self._on_deadline(until + margin_s(lease_s) / 2)

    def revoke(self) -> None:
        """Note that the service rejected the token."""
        self._revoked = True

    def cancel(self) -> None:
        """Note that the service cancelled the block."""
        self._cancelled = True

    def left_s(self) -> float:
        """Return the seconds until the lease is over."""
        return 0.0 if self._revoked else max(0.0, self.until - self._clock())

    def reason(self) -> StopReason | None:
        """Return why the trial must stop now, None when it may go on."""
        if self.left_s() <= 0:
            return StopReason.FENCED
        return StopReason.CANCELLED if self._cancelled else None
