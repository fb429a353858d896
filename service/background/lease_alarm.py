"""Ends this process when it is stopped or starved for longer than a lease that it works under.

A call that was about to be sent cannot be taken back by a check before it: the process may be frozen in between. The
kernel's timer runs on meanwhile, and its signal ends the process before it does anything else.
"""

import signal
import time
from typing import Protocol

_LATE_S = 0.5
"""A timer that took longer to set may run for too long, by as much."""


def now_s() -> float:
    """Return seconds of a clock that nobody sets, and that counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Alarm(Protocol):
    """Ends whoever works under a lease when it runs out."""

    def set(self, until_s: float) -> None:
        """End this process at `until_s`, by `now_s`; replaces the moment that was set before."""

    def clear(self) -> None:
        """Let it live."""


class LeaseAlarm:
    """The alarm of a whole process, by SIGALRM, whose default is the end; made in the main thread."""

    def __init__(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})

    def set(self, until_s: float) -> None:
        """End this process at `until_s`, by `now_s`; replaces the moment that was set before."""
        began = now_s() - 2 * _LATE_S
        while now_s() - began > _LATE_S:  # frozen in here, the timer would begin late
            began = now_s()
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, until_s - began))

    def clear(self) -> None:
        """Let it live."""
        signal.setitimer(signal.ITIMER_REAL, 0)
