"""Wake-up events that the main thread waits for, next to processes: set by other threads and by signal handlers.

A `threading.Event` takes a lock in `set()`, so a signal handler that sets the event its own thread waits for can
deadlock. Writing to an eventfd cannot.
"""

import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

_SAY_ALIVE_S = 10.0
"""Between two touches of the file that tells of the waiting thread's life."""

ASKED_TO_END = "asked to end: takes no more blocks; one that runs is finished, a second signal gives it back\n"
"""True with a block and without: a handler of signals does not know."""


class WakeEvent:
    """Wakes the thread that waits for it, and is clear again; one that was set before the wait is not lost.

    `alive` is a file whose age tells that the thread comes back to its waits, for health checks of containers.
    """

    def __init__(self, alive: Path | None = None) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alive = alive
        self._say_alive_at = 0.0

    def set(self) -> None:
        """Wake the waiting thread. Safe in signal handlers."""
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float, *, also: Sequence[int] = ()) -> bool:
        """Wait until it is set or one of the descriptors in `also` is readable; return whether anything came."""
        self._say_alive()
        ready = wait([self._fd, *also], max(0.0, timeout_s))
        if self._fd in ready:
            os.eventfd_read(self._fd)
        return bool(ready)

    def _say_alive(self) -> None:
        now = time.monotonic()
        if self._alive is None or now < self._say_alive_at:
            return
        self._say_alive_at = now + _SAY_ALIVE_S
        with suppress(OSError):  # a full disk is told by other means, and a file that grows old by the health check
            self._alive.parent.mkdir(parents=True, exist_ok=True)
            self._alive.touch()


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
            os.write(2, ASKED_TO_END.encode())
