"""Programs of the tests that start servers: a signal ends them by the way on which their servers are ended, too."""

import signal
import sys

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def leave_when_told() -> None:
    """Let signals leave every block that ends what it started; more of them while that goes on are ignored.

    By itself SIGTERM would end this process at once, and leave databases and servers behind.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _leave)


def _leave(number: int, _frame: object) -> None:
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    sys.exit(128 + number)
