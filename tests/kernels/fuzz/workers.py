"""Processes that run problems: each compiles what its set needs and then has a share of the GPU.

A kernel may hang, or break the process's hold on the GPU for good. So nothing that runs kernels is needed afterwards:
a process that says nothing for too long is ended, one that ends is replaced, and the rest of its set is run by another.
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
"""A function of a module: (problem, say) -> its outcome; `say` tells `Compiled` in between."""
PATIENCE_S = {"run": 90.0, "compile": 420.0}
"""How long a process may say nothing while it runs a problem, or compiles its kernels."""
LOOK_S = 1.0
LEAVING = "leaving"
"""Said by a process that cannot use the GPU any more, after the outcome of the problem that did it."""


@dataclass(frozen=True)
class Compiled:
    """How many kernels a process made ready for a problem."""

    new: int
    """Compiled now."""
    kept: int
    """Found in TileLang's cache on disk."""


@dataclass
class _Process:
    """One running process and what it has left to do."""

    process: Any
    pipe: "Connection[Any, Any]"
    left: deque[ScanProblem] = field(default_factory=deque)
    fresh: bool = False
    """Whether it has not yet answered for the first problem of its set."""
    doing: str = "compile"
    heard_at: float = field(default_factory=time.monotonic)

    def begin(self, problems: tuple[ScanProblem, ...]) -> None:
        """Hand a set over."""
        self.left.extend(problems)
        self.fresh, self.doing, self.heard_at = True, "compile", time.monotonic()
        self.pipe.send(problems)

    def answered(self, outcome: FuzzOutcome) -> FuzzOutcome:
        """Note what the first of the problems that are left became."""
        self.left.popleft()
        if self.fresh and outcome.ending == "refused":
            self.left.clear()
        self.fresh, self.doing = False, "compile"
        return outcome

    @property
    def silent_too_long(self) -> bool:
        return bool(self.left) and time.monotonic() - self.heard_at > PATIENCE_S[self.doing]


class FuzzPool:
    """Processes that work on sets of problems until the block ends."""

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
        """Problems that were taken and have no outcome yet."""
        return sum(len(one.left) for one in self._running) + sum(len(problems) for problems in self._waiting)

    def outcomes(self, sets: Iterator[tuple[ScanProblem, ...]]) -> Iterator[FuzzOutcome | Compiled | None]:
        """Yield what becomes of every problem, as it is known, and None now and then, so that time can be told.

        A set whose first problem is refused is left there. An empty set means that no other is wanted for now.
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
            wait([one.pipe for one in self._running if one.left], timeout=LOOK_S)
            for one in list(self._running):
                yield from self._heard(one)
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

    def _heard(self, one: _Process) -> Iterator[FuzzOutcome | Compiled]:
        """Yield what a process has said since; put what it leaves undone at its end back."""
        try:
            while one.left and one.pipe.poll():
                said = one.pipe.recv()
                one.heard_at = time.monotonic()
                if said == LEAVING:
                    self._replaced(one)
                elif isinstance(said, Compiled):
                    one.doing = "run"
                    yield said
                else:
                    yield one.answered(said)
        except (EOFError, OSError):
            yield from self._lost(one, "failed", "the process ended")
        else:
            if one.silent_too_long:
                why = f"nothing was heard for {PATIENCE_S[one.doing]:.0f} s ({one.doing})"
                yield from self._lost(one, "hung", why)

    def _lost(self, one: _Process, ending: Literal["failed", "hung"], why: str) -> Iterator[FuzzOutcome]:
        outcomes = [FuzzOutcome(problem=one.left.popleft(), ending=ending, why=why)] if one.left else []
        self._replaced(one)
        yield from outcomes

    def _replaced(self, one: _Process) -> None:
        """End a process and put what it leaves undone back."""
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
    """Work on sets until the parent hangs up, or the GPU is lost to this process."""
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
    import torch  # the process has it by now, if its answers need it

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
