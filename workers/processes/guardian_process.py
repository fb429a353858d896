"""A guardian process: ends trials that their worker does not end, because it is dead or does not move.

The worker tells it on its standard input which trials run ("+pgid trial", "-pgid trial") and until when the lease of
their block is good ("until SECONDS", boot time); every line is answered by one byte. The end of that pipe is the
worker's death: then it ends what was left. When the lease is over and a trial still runs, it ends that in the worker's
place, and waits for the next lease.

The kernel already kills a trainer when its parent dies, but not the trainer's own children, and not when the parent
is only stopped.
"""

import contextlib
import math
import os
import select
import signal
import sys
from collections.abc import Iterator

from experiments.runtime.processes import children_of, end_all, group_members
from workers.environment_variables import trial_mark
from workers.lease import boot_time_s
from workers.processes.guardian import end_trial

_ANSWER = b"."
_READ_BYTES = 65_536
_LOOK_EVERY_S = 1.0
"""A wait does not count the time in which the machine is suspended; the clock does."""


class Watch:
    """What a guardian knows: the trials of its worker, and until when they may run."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._until = math.inf
        self._torn = ""
        self.running: set[tuple[int, str]] = set()
        """Groups and trials that were not forgotten."""

    def hear(self, text: str) -> int:
        """Take in what the worker wrote; return how many lines were whole."""
        *lines, self._torn = (self._torn + text).split("\n")
        for line in lines:
            self._take(line)
        return len(lines)

    def _take(self, line: str) -> None:
        if line.startswith("until "):
            self._until = float(line.removeprefix("until "))
            return
        group, _space, trial_id = line[1:].partition(" ")
        change = self.running.add if line.startswith("+") else self.running.discard
        change((int(group), trial_id))

    def left_s(self) -> float:
        """Return the seconds until the lease is over, infinitely many without one."""
        return max(0.0, self._until - boot_time_s())

    def end_overdue(self) -> list[int]:
        """End the trials of a worker whose lease is over; return the processes that were found."""
        self._until = math.inf
        found = self._overdue()
        end_all(self._overdue, grace_s=0)
        return found

    def _overdue(self) -> list[int]:
        """Return the processes of all trials: also of one that the worker started and could not tell of any more."""
        trainers = {pid for child in children_of(self._worker) for pid in children_of(child)}
        groups = {pgid for pgid, _trial in self.running} | trainers
        strays = {pid for _pgid, trial in self.running for pid in trial_mark(trial).members()}
        return sorted(trainers | strays | {pid for pgid in groups for pid in group_members(pgid)})

    def end_left_behind(self) -> None:
        """End the trials of a worker that is dead."""
        for pgid, trial_id in self.running:
            end_trial(pgid, trial_id=trial_id, grace_s=0)


def main() -> None:
    """Guard the worker whose process id is the first argument until it is dead."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    watch = Watch(int(sys.argv[1]))
    for text in _told(watch):
        heard = watch.hear(text)
        with contextlib.suppress(OSError):  # the worker died meanwhile
            os.write(1, _ANSWER * heard)
    watch.end_left_behind()


def _told(watch: Watch) -> Iterator[str]:
    """Yield what the worker writes until it is dead, and end what is overdue meanwhile."""
    while True:
        left_s = watch.left_s()
        patience_s = None if math.isinf(left_s) else min(left_s, _LOOK_EVERY_S)
        if not select.select([0], [], [], patience_s)[0]:
            if watch.left_s() == 0.0:
                _say(watch.end_overdue())
            continue
        data = os.read(0, _READ_BYTES)
        if not data:
            return
        yield data.decode()


def _say(ended: list[int]) -> None:
    if ended:
        sys.stderr.write(f"guardian: the lease was over and the worker ended nothing; ended {ended} in its place\n")


if __name__ == "__main__":
    main()
