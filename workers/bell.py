"""A bell that other threads and signal handlers ring and the main thread waits for, next to processes.

A `threading.Event` takes a lock in `set()`, so a signal handler that sets the event its own thread waits for can
deadlock. Writing to an eventfd cannot.
"""

import os
from collections.abc import Sequence
from multiprocessing.connection import wait


class Bell:
    """Wakes the thread that waits for it; rings before the wait are not lost."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._fd

    def ring(self) -> None:
        """Wake the waiting thread. Safe in signal handlers."""
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float, *, also: Sequence[int] = ()) -> bool:
        """Wait for a ring or for one of the descriptors in `also`; return whether anything came."""
        ready = wait([self._fd, *also], max(0.0, timeout_s))
        if self._fd in ready:
            os.eventfd_read(self._fd)
        return bool(ready)
