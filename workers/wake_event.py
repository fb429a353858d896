"""Wake-up events that the main thread waits for, next to processes: set by other threads and by signal handlers.

A `threading.Event` takes a lock in `set()`, so a signal handler that sets the event its own thread waits for can
deadlock. Writing to an eventfd cannot.
"""

import math
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait


class WakeEvent:
    """Wakes the thread that waits for it, and is clear again; one that was set before the wait is not lost."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        """Wake the waiting thread. Safe in signal handlers."""
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float, *, also: Sequence[int] = ()) -> bool:
        """Wait until it is set or one of the descriptors in `also` is readable; return whether anything came."""
        ready = wait([self._fd, *also], max(0.0, timeout_s))
        if self._fd in ready:
            os.eventfd_read(self._fd)
        return bool(ready)


class StopFlag:
    """Set by SIGTERM and SIGINT, with which people and service managers ask a program to stop.

    SIGTERM asks to finish what runs, within `drain_s`; SIGINT, or a second signal, to drop it.
    """

    def __init__(self, wake_event: WakeEvent, *, drain_s: float = 0.0) -> None:
        self._wake_event = wake_event
        self._drain_s = drain_s
        self._drop_at = math.inf
        """When to drop what runs, by the monotonic clock; infinite while nobody asked."""

    def install(self) -> None:
        """Catch the two signals; the main thread must call this."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def __call__(self) -> bool:
        """Return whether this program has to end, and begins nothing new."""
        return not math.isinf(self._drop_at)

    def now(self) -> bool:
        """Return whether it has to drop what runs, too."""
        return time.monotonic() >= self._drop_at

    def _on_signal(self, number: int, _frame: object) -> None:
        at_once = number == signal.SIGINT or self()
        self._drop_at = min(self._drop_at, time.monotonic() + (0.0 if at_once else self._drain_s))
        self._wake_event.set()
        if not self.now():  # a logger's lock may be held by the code that was interrupted
            os.write(2, b"asked to end: finishing the block that runs; a second signal gives it back\n")
