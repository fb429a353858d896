"""The log and the steps of a running trial, cut into messages for the service."""

import codecs
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from pydantic import BaseModel, StrictInt

from ablate.experiments.records.messages import MOST_FAILURE, MOST_WAITING, LogChunk, TrialProgress
from ablate.workers.isolation.node_secrets import Mask
from ablate.workers.lease import StopReason
from ablate.workers.paths import TrialPaths, open_plain

CHUNK_BYTES = 65_536
"""Most log text of one trial in one message."""

MAX_LOG_JSON_BYTES = 512 * 2**10
"""Most log text of all trials in one message, as JSON: control characters take six bytes there."""

LOG_LIMIT_BYTES = 8 * 2**20
"""Most log text of one trial in all; the rest stays in the node's file."""

_STEPS_BYTES = 4 * 2**20
"""Most text of the step file that is read at once."""

_RECENT_STEPS = 16
"""Number of steps for the median time of a step."""

_MOST_SHOWN = 1e300
"""Sums of such numbers are finite."""

_TRUNCATED = "\n[log cut here; the whole file is on the node]\n"


def log_stop(log: Path, reason: StopReason, wall_s: float, how_far: str) -> None:
    """Write to a trial's log when and why the worker stopped it; otherwise the log would just end."""
    line = f"\n[the worker stopped this trial after {wall_s:.1f} s and {how_far}: {reason}]\n"
    with suppress(OSError), open_plain(log, os.O_WRONLY | os.O_APPEND) as file:  # a full disk is reported elsewhere
        file.write(line.encode())


class LogTail:
    """New text of a log file with absolute offsets, never splitting a character.

    An offset counts the bytes of the sent text in UTF-8. It equals the offset in the file as long as the file is clean
    UTF-8: damaged bytes and NUL, which a database cannot store, become U+FFFD.
    """

    def __init__(self, trial_id: str, path: Path, mask: Mask = Mask({})) -> None:  # noqa: B008 - it never changes
        self._trial_id = trial_id
        self._mask = mask
        self.is_whole = False
        """Whether nothing writes the file any more, so that its end is no beginning of a secret."""
        self._path = path
        self._read_bytes = 0
        self._sent_bytes = 0
        self._pending = ""
        self._cut = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_chunk(self) -> LogChunk | None:
        """Return the next piece of text; the same piece again until `accepted` is called."""
        if not self._pending and not self._cut:
            self._pending = self._read()
        if not self._pending:
            return None
        return LogChunk(trial_id=self._trial_id, offset=self._sent_bytes, text=self._pending)

    def accepted(self, chunk: LogChunk) -> None:
        """Continue after `chunk`."""
        if self._pending and chunk.offset == self._sent_bytes:
            self._sent_bytes += len(self._pending.encode())
            self._pending = ""

    def _read(self) -> str:
        try:
            with open_plain(self._path) as file:
                file.seek(self._read_bytes)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return ""
        if len(data) == CHUNK_BYTES or not self.is_whole:
            data = data[: len(data) - self._mask.held(data)]
        self._read_bytes += len(data)
        text = self._decoder.decode(self._mask.masked(data)).replace("\0", "\ufffd")
        if self._read_bytes >= LOG_LIMIT_BYTES:
            self._cut = True
            text += _TRUNCATED
        return text


class _ShownStep(BaseModel):
    """The part of a line of the step file that people see while the trial runs."""

    index: StrictInt
    seconds: float
    tokens: StrictInt
    loss: float | None = None


class TrialOutput:
    """Log and progress of one running trial."""

    def __init__(self, trial_id: str, paths: TrialPaths, *, steps_total: int, mask: Mask = Mask({})) -> None:  # noqa: B008
        self.log = LogTail(trial_id, paths.log, mask)
        self.is_over = False
        """Whether its process has ended."""
        self.failure: str | None = None
        """Why it has no measurement."""
        self._trial_id = trial_id
        self._steps = paths.steps
        self._steps_total = steps_total
        self._read_bytes = 0
        self._progress = TrialProgress(trial_id=trial_id, steps_done=0, steps_total=steps_total)
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Seconds of the latest steps, without the first step of all, which compiles."""
        self.sent = self._progress
        """The progress that the service has."""

    def unsent(self) -> TrialProgress | None:
        """Return the progress of the trial, None if the service has it."""
        if self.sent.over:
            return None
        now = self.progress().model_copy(update={"over": self.is_over, "failure": self.failure})
        return None if now == self.sent else now

    def progress(self) -> TrialProgress:
        """Return the progress according to the last whole line of the step file."""
        try:
            with open_plain(self._steps) as file:
                file.seek(self._read_bytes)
                whole, newline, _torn = file.read(_STEPS_BYTES).rpartition(b"\n")
        except FileNotFoundError:
            return self._progress
        self._read_bytes += len(whole) + len(newline)
        if whole:
            with suppress(ValueError, OverflowError):  # no step: the receipt says so
                self._progress = self._from_steps(whole.splitlines()[-_RECENT_STEPS:])
        return self._progress

    def _from_steps(self, lines: Sequence[bytes]) -> TrialProgress:
        steps = [_ShownStep.model_validate_json(line) for line in lines]
        step = steps[-1]
        if not 0 <= step.index < self._steps_total:
            raise ValueError(f"there is no step {step.index}")
        self._recent_s.extend(step.seconds for step in steps if step.index > 0 and 0 < step.seconds <= _MOST_SHOWN)
        return TrialProgress(
            trial_id=self._trial_id,
            steps_done=1 + step.index,
            steps_total=self._steps_total,
            tokens_per_s=_drawable(step.tokens / step.seconds) if step.tokens and step.seconds > 0 else None,
            loss=_drawable(step.loss),
            step_s=_drawable(median(self._recent_s)) if self._recent_s else None,
        )


def _drawable(value: float | None) -> float | None:
    """Return a number that a picture can show, None for any other."""
    return value if value is not None and abs(value) <= _MOST_SHOWN else None


class BlockOutput:
    """The output of a block's trials: the worker adds trials, and the heartbeat thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: dict[str, TrialOutput] = {}
        self._running: str | None = None
        self._waiting: str | None = None

    def add(self, trial_id: str, paths: TrialPaths, *, steps_total: int, mask: Mask = Mask({})) -> None:  # noqa: B008
        """Add a trial, which is the running one from now on."""
        with self._lock:
            self._trials[trial_id] = TrialOutput(trial_id, paths, steps_total=steps_total, mask=mask)
            self._running = trial_id

    def runs(self, trial_id: str) -> None:
        """Note that this trial is the running one from now on."""
        with self._lock:
            self._running = trial_id

    def waits(self, reason: str | None) -> None:
        """Note what the next trial waits for; None when it waits no more."""
        with self._lock:
            self._waiting = None if reason is None else reason[:MOST_WAITING]

    @property
    def waiting(self) -> str | None:
        """What the next trial waits for, None if it does not wait."""
        with self._lock:
            return self._waiting

    def end(self, trial_id: str, *, failure: str | None = None) -> None:
        """Note that the process of a trial has ended, and why it has no measurement."""
        with self._lock:
            self._trials[trial_id].failure = failure and failure[:MOST_FAILURE]
            self._trials[trial_id].is_over = True
            self._trials[trial_id].log.is_whole = True

    @property
    def running(self) -> str | None:
        """The trial whose process runs now; None between trials, and while the next one waits."""
        with self._lock:
            idle = self._running is None or self._waiting is not None or self._trials[self._running].is_over
            return None if idle else self._running

    def progress(self) -> TrialProgress | None:
        """Return the progress of the running trial, None before the first."""
        with self._lock:
            return None if self._running is None else self._trials[self._running].progress()

    def unsent_progress(self) -> tuple[TrialProgress, ...]:
        """Return the progress that the service lacks; includes the running trial, as the last one, unless it waits."""
        with self._lock:
            trials = [trial.unsent() for name, trial in self._trials.items() if name != self._running]
            if self._running is not None and self._waiting is None:
                running = self._trials[self._running]
                trials.append(running.unsent() or running.progress())
            return tuple(progress for progress in trials if progress is not None)

    def progress_accepted(self, progress: Iterable[TrialProgress]) -> None:
        """Note the progress that the service has."""
        with self._lock:
            for one in progress:
                self._trials[one.trial_id].sent = one

    def chunks(self) -> tuple[LogChunk, ...]:
        """Return the next log chunks of trials, together at most `MAX_LOG_JSON_BYTES`; the others come later."""
        with self._lock:
            chunks: list[LogChunk] = []
            left = MAX_LOG_JSON_BYTES
            for trial in self._trials.values():
                chunk = trial.log.next_chunk()
                left -= 0 if chunk is None else len(json.dumps(chunk.text))
                if chunk is not None and left >= 0:
                    chunks.append(chunk)
            return tuple(chunks)

    def chunks_accepted(self, chunks: Iterable[LogChunk]) -> None:
        """Note the log chunks that the service has."""
        with self._lock:
            for chunk in chunks:
                self._trials[chunk.trial_id].log.accepted(chunk)
