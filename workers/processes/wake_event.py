"""Wake-up events for the main thread, which other threads and signal handlers set.

A `threading.Event` takes a lock in `set()`: a signal handler that sets the event of its own waiting thread can
deadlock. A write to an eventfd cannot.
"""

import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

_TOUCH_EVERY_S = 10.0
"""Shortest time between two touches of the health-check file."""

_SIGNAL_PATIENCE_S = 1.0
"""Most time between the signal to the first and to the last process of a job."""

ENDING = "ending: takes no more blocks; finishes a running one, or gives it back at a second signal\n"
"""Correct with and without a block, since a signal handler cannot tell."""


class WakeEvent:
    """Wakes the waiting thread once; an event that was set before the wait is not lost.

    `alive` is a file for the health checks of containers: its age shows whether the thread still returns to its waits.
    """

    def __init__(self, alive: Path | None = None) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alive = alive
        self._touch_at = 0.0

    def set(self) -> None:
        """Wake the waiting thread. Safe in signal handlers."""
        os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float, *, also: Sequence[int] = ()) -> bool:
        """Wait until it is set or a descriptor in `also` is readable; return False after `timeout_s`."""
        self._touch()
        ready = wait([self._fd, *also], max(0.0, timeout_s))
        if self._fd in ready:
            os.eventfd_read(self._fd)
        return bool(ready)

    def _touch(self) -> None:
        now = time.monotonic()
        if self._alive is None or now < self._touch_at:
            return
        self._touch_at = now + _TOUCH_EVERY_S
        with suppress(OSError):  # other checks report a full disk, and the health check an old file
            self._alive.parent.mkdir(parents=True, exist_ok=True)
            self._alive.touch()


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Slurm can send SIGUSR1 some time before the end of a job."""


class StopFlag:
    """Says when this program must begin nothing new, and when it must stop a running block.

    After SIGTERM or SIGUSR1 a running block may finish within `drain_s`, unless it should take longer. SIGINT, a second
    signal and the end of `lasts_s` stop it.
    """

    def __init__(
        self, wake_event: WakeEvent, *, drain_s: float = 0.0, lasts_s: float = math.inf, idle_s: float = math.inf
    ) -> None:
        """Stay for `lasts_s` seconds, and without a block for at most `idle_s`."""
        self._wake_event = wake_event
        self._drain_s = drain_s
        self._idle_s = idle_s
        self._idle_since = time.monotonic()
        """Infinite while a block runs. All times are monotonic."""
        self._ends_at = self._idle_since + lasts_s
        self._drop_at = self._ends_at
        """When to stop a running block."""
        self._block_ends_at = -math.inf
        """When the running block should have ended."""
        self.is_told = False
        """Whether a signal came."""

    def install(self) -> None:
        """Catch the signals; the main thread must call this."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def begins(self, expected_s: float | None) -> None:
        """Note that a block begins, and how long it should take; None if nobody knows."""
        self._block_ends_at = time.monotonic() + (expected_s or 0.0)
        self._idle_since = math.inf
        if self.is_told:
            self._drop_if_too_long()

    def ended(self) -> None:
        """Note that no block runs from now on."""
        self._idle_since, self._block_ends_at = time.monotonic(), -math.inf

    def left_s(self) -> float:
        """Return the seconds until this program ends by itself."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def reason(self) -> str | None:
        """Why this program must begin nothing new; None while it may."""
        if self.is_told:
            return "it was told to stop"
        if not self.left_s():
            return "its time is over"
        if time.monotonic() - self._idle_since >= self._idle_s:
            return f"there was no work for {self._idle_s:g} s"
        return None

    def __call__(self) -> bool:
        """Return whether this program must begin nothing new."""
        return self.reason is not None

    def told_soon(self) -> bool:
        """Return whether a signal came, or comes now: a cluster sends it to one process of a job after another."""
        deadline = time.monotonic() + _SIGNAL_PATIENCE_S
        while not self.is_told and time.monotonic() < deadline:
            time.sleep(_SIGNAL_PATIENCE_S / 20)
        return self.is_told

    def now(self) -> bool:
        """Return whether it must also stop a running block."""
        return time.monotonic() >= self._drop_at

    def _on_signal(self, number: int, _frame: object) -> None:
        at_once = number == signal.SIGINT or self.is_told
        self.is_told = True
        self._drop_at = min(self._drop_at, time.monotonic() + (0.0 if at_once else self._drain_s))
        self._drop_if_too_long()
        self._wake_event.set()
        if not self.now():  # not by a logger: the interrupted code may have its lock
            os.write(2, ENDING.encode())

    def _drop_if_too_long(self) -> None:
        if self._block_ends_at > self._drop_at:
            self._drop_at = -math.inf
