"""A guardian process: kills what trials left behind when the worker itself dies without a word.

The kernel already kills a trainer when its parent dies, but not the trainer's own children. The worker tells the
guardian which trials run ("+pgid trial" and "-pgid trial" lines on its standard input); the end of that pipe is the
worker's death.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from types import TracebackType

from experiments.runtime.processes import end_all, group_members
from workers.environment_variables import trial_mark

_MODULE = "workers.guardian"


class Guardian:
    """The worker's end of the pipe."""

    def __init__(self) -> None:
        theirs, self._pipe = os.pipe()
        self._process = subprocess.Popen([sys.executable, "-m", _MODULE], stdin=theirs, start_new_session=True)
        os.close(theirs)

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._pipe)
        self._process.wait()

    def watch(self, pgid: int, trial_id: str) -> None:
        """Kill this trial's processes if the worker dies."""
        self._tell(f"+{pgid} {trial_id}")

    def forget(self, pgid: int, trial_id: str) -> None:
        """Stop watching a trial that has ended: its group's number may be used again."""
        self._tell(f"-{pgid} {trial_id}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed: the kernel's death signal remains
            os.write(self._pipe, f"{line}\n".encode())


def left_behind(lines: Iterable[str]) -> set[tuple[int, str]]:
    """Read "+pgid trial" and "-pgid trial" lines to the end; return groups and trials still running then."""
    running: set[tuple[int, str]] = set()
    for line in lines:
        group, _space, trial_id = line[1:].strip().partition(" ")
        change = running.add if line.startswith("+") else running.discard
        change((int(group), trial_id))
    return running


def end_trial(pgid: int, *, trial_id: str, grace_s: float, leader: Callable[[], bool] | None = None) -> tuple[int, ...]:
    """End a trial's group and the strays that left it: SIGTERM, `grace_s`, SIGKILL; return who would not die.

    A trial that has just been forked has no group of its own yet. `leader` tells whether the trial's own process is
    known to live, and then it counts whatever group it is in.
    """
    mark = trial_mark(trial_id)

    def find() -> list[int]:
        first = {pgid} if leader is not None and leader() else set()
        return sorted(first | {*group_members(pgid), *mark.members()})

    return end_all(find, grace_s=grace_s).survivors


def main() -> None:
    """Wait for the worker's death, then kill what its trials left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group, trial_id in left_behind(sys.stdin):
        end_trial(group, trial_id=trial_id, grace_s=0)


if __name__ == "__main__":
    main()
