"""The wish to end: set by the two signals with which people and service managers ask a program to stop."""

import signal

from workers.bell import Bell


class StopFlag:
    """Set by SIGTERM and SIGINT."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._set = False

    def install(self) -> None:
        """Catch the two signals; the main thread must call this."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def __call__(self) -> bool:
        """Return whether this worker has to end."""
        return self._set

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._set = True
        self._bell.ring()
