"""Follow a trial's log and steps while it runs, and cut them into messages for the service."""

import codecs
import json
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from experiments.records.messages import LogChunk, TrialProgress
from workers.lease import StopReason
from workers.paths import TrialPaths

CHUNK_BYTES = 65_536
"""Most log text of one trial in one message."""

LOG_LIMIT_BYTES = 8 * 2**20
"""Most log text of one trial in all; the rest stays in the node's file."""

_STEPS_OF_LATE = 16
"""Steps of which the median says how long one takes."""

_TRUNCATED = "\n[log cut here; the whole file is on the node]\n"


def say_stopped(log: Path, reason: StopReason, wall_s: float, how_far: str) -> None:
    """Write into a trial's log when and `how_far` the worker stopped it; otherwise the log would just end."""
    with suppress(OSError), log.open("a") as file:  # a full disk has its own reason
        file.write(f"\n[the worker stopped this trial after {wall_s:.1f} s and {how_far}: {reason}]\n")


class LogTail:
    """New text of a log file at absolute offsets, never splitting a character.

    Offsets count the bytes of the text that was sent, encoded as UTF-8. They equal the file's own as long as the file
    is clean UTF-8; damaged bytes and NUL, which a database cannot hold, become U+FFFD.
    """

    def __init__(self, trial_id: str, path: Path) -> None:
        self._trial_id = trial_id
        self._path = path
        self._read_bytes = 0
        self._sent_bytes = 0
        self._pending = ""
        self._cut = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_chunk(self) -> LogChunk | None:
        """Return the next piece that was not accepted yet; the same piece until `accepted` is called."""
        if not self._pending and not self._cut:
            self._pending = self._read()
        if not self._pending:
            return None
        return LogChunk(trial_id=self._trial_id, offset=self._sent_bytes, text=self._pending)

    def accepted(self, chunk: LogChunk) -> None:
        """Go on after `chunk`."""
        if self._pending and chunk.offset == self._sent_bytes:
            self._sent_bytes += len(self._pending.encode())
            self._pending = ""

    def _read(self) -> str:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return ""
        self._read_bytes += len(data)
        text = self._decoder.decode(data).replace("\0", "\ufffd")
        if self._read_bytes >= LOG_LIMIT_BYTES:
            self._cut = True
            text += _TRUNCATED
        return text


class TrialOutput:
    """What people may know about one trial while it runs."""

    def __init__(self, trial_id: str, paths: TrialPaths, *, steps_total: int) -> None:
        self.log = LogTail(trial_id, paths.log)
        self._trial_id = trial_id
        self._steps = paths.steps
        self._steps_total = steps_total
        self._read_bytes = 0
        self._progress = TrialProgress(trial_id=trial_id, steps_done=0, steps_total=steps_total)
        self._late_s: deque[float] = deque(maxlen=_STEPS_OF_LATE)
        """Seconds of its steps of late, the first one of all left out: it compiles."""
        self._is_over = False
        self._told = self._progress
        """What the service knows."""

    def is_over(self) -> None:
        """Note that its process has ended."""
        self._is_over = True

    def news(self) -> TrialProgress | None:
        """Return how far the trial is, None where the service knows."""
        if self._told.over:
            return None
        now = self.progress().model_copy(update={"over": self._is_over})
        return None if now == self._told else now

    def told(self, progress: TrialProgress) -> None:
        """Note what the service knows."""
        self._told = progress

    def progress(self) -> TrialProgress:
        """Return how far the trial is, from the last whole line of its step file."""
        try:
            with self._steps.open("rb") as file:
                file.seek(self._read_bytes)
                whole, newline, _torn = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return self._progress
        self._read_bytes += len(whole) + len(newline)
        if whole:
            self._progress = self._from_steps(whole.splitlines()[-_STEPS_OF_LATE:])
        return self._progress

    def _from_steps(self, lines: Sequence[bytes]) -> TrialProgress:
        steps = [json.loads(line, parse_constant=lambda _name: None) for line in lines]  # NaN and Infinity are no JSON
        self._late_s.extend(step["seconds"] for step in steps if step["index"] > 0)
        step = steps[-1]
        rate = step["tokens"] / step["seconds"] if step["seconds"] else None
        return TrialProgress(
            trial_id=self._trial_id,
            steps_done=step["index"] + 1,
            steps_total=self._steps_total,
            tokens_per_s=rate,
            loss=step["loss"],
            step_s=median(self._late_s) if self._late_s else None,
        )


class BlockOutput:
    """The output of a block's trials; trials are added by the worker, and read by the heartbeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: dict[str, TrialOutput] = {}
        self._running: str | None = None

    def add(self, trial_id: str, paths: TrialPaths, *, steps_total: int) -> None:
        """Follow one more trial, which is the one that runs now."""
        with self._lock:
            self._trials[trial_id] = TrialOutput(trial_id, paths, steps_total=steps_total)
            self._running = trial_id

    def runs(self, trial_id: str) -> None:
        """Note that this one of the trials that were added is the one that runs now."""
        with self._lock:
            self._running = trial_id

    def progress(self) -> tuple[TrialProgress, ...]:
        """Return the progress of the trial that runs now, if one was started."""
        with self._lock:
            return () if self._running is None else (self._trials[self._running].progress(),)

    def is_over(self, trial_id: str) -> None:
        """Note that the process of a trial has ended."""
        with self._lock:
            self._trials[trial_id].is_over()

    def news(self) -> tuple[TrialProgress, ...]:
        """Return the progress of every trial of which the service does not know all, and last of the one that runs."""
        with self._lock:
            others = [trial.news() for name, trial in self._trials.items() if name != self._running]
            runs = None if self._running is None else self._trials[self._running]
            last = None if runs is None else runs.news() or runs.progress()
            return tuple(one for one in (*others, last) if one is not None)

    def told(self, progress: Iterable[TrialProgress]) -> None:
        """Note what the service knows."""
        with self._lock:
            for one in progress:
                self._trials[one.trial_id].told(one)

    def chunks(self) -> tuple[LogChunk, ...]:
        """Return the next log chunk of every trial that has one."""
        with self._lock:
            found = (trial.log.next_chunk() for trial in self._trials.values())
            return tuple(chunk for chunk in found if chunk is not None)

    def accepted(self, chunks: Iterable[LogChunk]) -> None:
        """Do not send these chunks again."""
        with self._lock:
            for chunk in chunks:
                self._trials[chunk.trial_id].log.accepted(chunk)
