"""Processes that run problems. Each compiles the kernels of its set and then shares the GPU.

A kernel may hang, or break its process's access to the GPU for good. So every process is replaceable: a process that
reports nothing for too long is ended, an ended process is replaced, and another one runs the rest of its set.
"""

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeAlias

from tests.kernels.fuzz.outcomes import FuzzOutcome
from tests.kernels.fuzz.problems import ScanProblem

Answer: TypeAlias = Callable[[ScanProblem, Callable[[object], None]], FuzzOutcome]
"""Function at module level: (problem, report) -> its outcome. `report` receives `Compiled` in between."""
PATIENCE_S = {"run": 90.0, "compile": 420.0}
"""Longest silence in seconds of a process that runs a problem or compiles its kernels."""
POLL_S = 1.0
LEAVING = "leaving"
"""Last message of a process that has lost the GPU, after the outcome of the responsible problem."""


@dataclass(frozen=True)
class Compiled:
    """Number of kernels that a process compiled or loaded for a problem."""

    new: int
    """Compiled kernels."""
    kept: int
    """Kernels from TileLang's cache on disk."""


@dataclass
class _Process:
    """One running process and its remaining problems."""

    process: Any
    pipe: "Connection[Any, Any]"
    left: deque[ScanProblem] = field(default_factory=deque)
    fresh: bool = False
    """Whether the first problem of its set has no outcome yet."""
    doing: str = "compile"
    last_message_s: float = field(default_factory=time.monotonic)

    def begin(self, problems: tuple[ScanProblem, ...]) -> None:
        """Send a set of problems."""
        self.left.extend(problems)
        self.fresh, self.doing, self.last_message_s = True, "compile", time.monotonic()
        self.pipe.send(problems)

    def answered(self, outcome: FuzzOutcome) -> FuzzOutcome:
        """Record the outcome of the first remaining problem."""
        self.left.popleft()
        if self.fresh and outcome.ending == "refused":
            self.left.clear()
        self.fresh, self.doing = False, "compile"
        return outcome

    @property
    def silent_too_long(self) -> bool:
        return bool(self.left) and time.monotonic() - self.last_message_s > PATIENCE_S[self.doing]


class FuzzPool:
    """Processes that work on sets of problems until the end of the block."""

    def __init__(self, answer: Answer, size: int) -> None:
        self._answer = answer
        self._size = size
        self._running: list[_Process] = []
        self._waiting: deque[tuple[ScanProblem, ...]] = deque()

    def __enter__(self) -> "FuzzPool":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._running:
            _end(one)

    @property
    def pending(self) -> int:
        """Number of accepted problems without an outcome."""
        return sum(len(one.left) for one in self._running) + sum(len(problems) for problems in self._waiting)

    def outcomes(self, sets: Iterator[tuple[ScanProblem, ...]]) -> Iterator[FuzzOutcome | Compiled | None]:
        """Yield the outcome of every problem, and None in between so that the caller can check the time.

        A set ends if its first problem is refused. An empty set means: no more sets for now.
        """
        more = True
        while more or self.pending:
            free = self._size - sum(bool(one.left) for one in self._running) - len(self._waiting)
            for _ in range(free if more else 0):
                following = next(sets, None)
                more = following is not None
                if not following:
                    break
                self._waiting.append(following)
            self._hand_out()
            wait([one.pipe for one in self._running if one.left], timeout=POLL_S)
            for one in list(self._running):
                yield from self._received(one)
            yield None

    def _hand_out(self) -> None:
        for one in [one for one in self._running if not one.process.is_alive() and not one.left]:
            self._replaced(one)
        idle = [one for one in self._running if not one.left]
        while self._waiting and (idle or len(self._running) < self._size):
            (idle.pop() if idle else self._started()).begin(self._waiting.popleft())

    def _started(self) -> _Process:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._answer), daemon=True)
        process.start()
        theirs.close()
        started = _Process(process, ours)
        self._running.append(started)
        return started

    def _received(self, one: _Process) -> Iterator[FuzzOutcome | Compiled]:
        """Yield new messages of a process. Its remaining problems return to the queue if it ends."""
        try:
            while one.left and one.pipe.poll():
                message = one.pipe.recv()
                one.last_message_s = time.monotonic()
                if message == LEAVING:
                    self._replaced(one)
                elif isinstance(message, Compiled):
                    one.doing = "run"
                    yield message
                else:
                    yield one.answered(message)
        except (EOFError, OSError):
            yield from self._lost(one, "failed", "the process ended")
        else:
            if one.silent_too_long:
                why = f"no message for {PATIENCE_S[one.doing]:.0f} s ({one.doing})"
                yield from self._lost(one, "hung", why)

    def _lost(self, one: _Process, ending: Literal["failed", "hung"], why: str) -> Iterator[FuzzOutcome]:
        outcomes = [FuzzOutcome(problem=one.left.popleft(), ending=ending, why=why)] if one.left else []
        self._replaced(one)
        yield from outcomes

    def _replaced(self, one: _Process) -> None:
        """End a process and return its remaining problems to the queue."""
        self._running.remove(one)
        if one.left:
            self._waiting.append(tuple(one.left))
            one.left.clear()
        _end(one)


def _end(one: _Process) -> None:
    one.pipe.close()
    one.process.kill()
    one.process.join()


def _serve(pipe: "Connection[Any, Any]", answer: Answer) -> None:
    """Work on sets until the parent closes the pipe or this process loses the GPU."""
    for stream in (1, 2):  # a compiler that fails prints the whole program
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
    while True:
        try:
            problems = pipe.recv()
        except (EOFError, OSError):
            return
        for at, problem in enumerate(problems):
            outcome = answer(problem, pipe.send)
            pipe.send(outcome)
            if outcome.ending == "refused" and at == 0:
                break
            if outcome.ending == "failed" and _gpu_is_lost():
                pipe.send(LEAVING)
                return


def _gpu_is_lost() -> bool:
    import torch  # already imported if the answers need it

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
