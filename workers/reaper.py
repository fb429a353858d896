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
        theirs, self._pipe = os.pipe()
        self._process = subprocess.Popen([sys.executable, "-m", _MODULE], stdin=theirs, start_new_session=True)
        os.close(theirs)

    def __enter__(self) -> "Reaper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._pipe)
        self._process.wait()

    def watch(self, pgid: int) -> None:
        """Kill this group if the worker dies."""
        self._tell(f"+{pgid}")

    def forget(self, pgid: int) -> None:
        """Stop watching a group that has ended: its number may be used again."""
        self._tell(f"-{pgid}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed: the kernel's death signal remains
            os.write(self._pipe, f"{line}\n".encode())


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
