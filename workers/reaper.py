"""A guardian process: kills what trials left behind when the worker itself dies without a word.

The kernel already kills a trainer when its parent dies, but not the trainer's own children. The worker tells the
guardian which process groups are in use ("+pgid" and "-pgid" lines on its standard input); the end of that pipe is
the worker's death.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType

_MODULE = "workers.reaper"


class Reaper:
    """The worker's end of the pipe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, start_new_session=True, text=True, bufsize=1
        )

    def __enter__(self) -> "Reaper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def watch(self, pgid: int) -> None:
        """Kill this group if the worker dies."""
        self._tell(f"+{pgid}")

    def forget(self, pgid: int) -> None:
        """The group has ended; its number may be used again."""
        self._tell(f"-{pgid}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed: the kernel's death signal remains
            self._process.stdin.write(line + "\n")


def left_behind(lines: Iterable[str]) -> set[int]:
    """Read "+pgid" and "-pgid" lines to the end; return the groups still in use then."""
    groups: set[int] = set()
    for line in lines:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))
    return groups


def main() -> None:
    """Wait for the worker's death, then kill the groups it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in left_behind(sys.stdin):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
