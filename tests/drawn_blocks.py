"""Blocks that a worker runs in time that is drawn, told to the real service by the worker's own code, for tests.

Only the trainers and the clock are not real: SQLite is asked for the time that the test says it is.
"""

import json
import random
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Engine, event

from experiments.design.slices import running_order
from tests.api_stack import Api, receipts_of
from workers.paths import TrialPaths
from workers.processes.trial_output import BlockOutput

_UNIX_EPOCH_JD = 2440587.5


class Clock:
    """The time of day that SQLite tells, in seconds since 1970."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    @contextmanager
    def told_by_sqlite(self) -> Iterator[None]:
        """Let every connection that is opened meanwhile tell this time."""

        def opened(connection: sqlite3.Connection, _record: object) -> None:
            connection.create_function("julianday", 1, lambda _word: _UNIX_EPOCH_JD + self.now / 86400)

        event.listen(Engine, "connect", opened)
        try:
            yield
        finally:
            event.remove(Engine, "connect", opened)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long the parts of every trial take, in seconds."""

    before_s: float
    """From its start to the end of its first step."""
    warmup_s: float
    step_s: float
    after_s: float
    steps: int
    slices: int = 1

    @property
    def trial_s(self) -> float:
        """A whole trial."""
        return self.before_s + self.warmup_s + (self.steps - 1) * self.step_s + self.after_s


@dataclass(frozen=True, kw_only=True)
class Where:
    """How far a block is."""

    unstarted: int = 0
    """Trials."""
    runs: Literal["", "start", "steps"] = ""
    """What the last trial that started does; it starts until it has made two steps."""
    steps_left: int = 0
    """Of all trials that have made two."""


@dataclass(kw_only=True)
class _Trial:
    id: str
    folder: Path
    steps: int = 0


@dataclass(kw_only=True)
class DrawnBlock:
    """One attempt at a block."""

    api: Api
    clock: Clock
    block: dict[str, Any]
    pace: Pace
    heartbeat_s: float
    folder: Path
    output: BlockOutput = field(default_factory=BlockOutput)
    now: Where = Where()
    told: Where = Where()
    """As the service heard it last."""

    def run(self) -> Iterator[float]:
        """Let time pass and tell the service at each heartbeat; yield what is left, in seconds, then and in between."""
        happenings = sorted(self._happenings(), key=lambda one: one[0])
        began, end = self.clock.now, happenings[-1][0]
        for number in count(1):
            moment = number * self.heartbeat_s / 2
            while happenings and happenings[0][0] <= moment:
                happenings.pop(0)[1]()
            self.clock.now = began + min(moment, end)
            if moment >= end:
                return
            if number % 2 == 0:
                self._beat()
            yield end - moment

    def report(self, node: str, **changes: Any) -> None:
        """Hand the block in."""
        answer = self.api.attempt(self.block, "report", receipts=receipts_of(self.block, node, **changes))
        assert answer.status_code == 200, answer.text

    def _beat(self) -> None:
        news = self.output.news()
        told = [one.model_dump(mode="json") for one in news]
        answer = self.api.attempt(self.block, "heartbeat", progress=told)
        assert answer.status_code == 200, answer.text
        self.output.told(news)
        self.told = self.now

    def _happenings(self) -> Iterator[tuple[float, Any]]:
        """Yield (moment, what happens) of trials one after another, or by turns in slices."""
        trials = []
        for one in self.block["trials"]:
            folder = self.folder / self.block["attempt_id"] / one["trial_id"]
            folder.mkdir(parents=True)
            trials.append(_Trial(id=one["trial_id"], folder=folder))
        self.now = self.told = Where(unstarted=len(trials))
        now, pace, sliced = 0.0, self.pace, self.pace.slices > 1
        first = 2 if sliced else pace.steps
        for trial in trials:
            yield now, lambda one=trial: self._starts(one)
            now += pace.before_s
            yield now, lambda one=trial: self._step(one)
            now += pace.warmup_s
            now = yield from self._steps(trial, now, first - 1)
            if not sliced:
                now += pace.after_s
                yield now, lambda one=trial: self._ends(one)
        shares = [(pace.steps - first + number) // pace.slices for number in range(pace.slices)]
        for number, trial in running_order(trials, pace.slices) if sliced else ():
            yield now, lambda one=trial: self.output.runs(one.id)
            now = yield from self._steps(trial, now, shares[number])
        for trial in trials if sliced else ():
            yield now, lambda one=trial: self.output.runs(one.id)
            now += pace.after_s
            yield now, lambda one=trial: self._ends(one)

    def _steps(self, trial: _Trial, now: float, steps: int) -> Generator[tuple[float, Any], None, float]:
        for _ in range(steps):
            now += self.pace.step_s
            yield now, lambda: self._step(trial)
        return now  # of `yield from`

    def _starts(self, trial: _Trial) -> None:
        self.output.add(trial.id, TrialPaths(folder=trial.folder), steps_total=self.pace.steps)
        self.now = replace(self.now, unstarted=self.now.unstarted - 1, runs="start")

    def _step(self, trial: _Trial) -> None:
        seconds = self.pace.before_s if trial.steps == 0 else self.pace.step_s
        phase = "timed" if trial.steps else "compile"
        line = {"index": trial.steps, "phase": phase, "seconds": seconds, "tokens": 512, "loss": 8.0}
        with TrialPaths(folder=trial.folder).steps.open("a") as file:
            file.write(json.dumps(line) + "\n")
        trial.steps += 1
        if trial.steps == 2:
            self.now = replace(self.now, runs="steps", steps_left=self.now.steps_left + self.pace.steps - 2)
        elif trial.steps > 2:
            self.now = replace(self.now, steps_left=self.now.steps_left - 1)

    def _ends(self, trial: _Trial) -> None:
        self.output.is_over(trial.id)


def draw_pace(chance: random.Random, *, sliced: bool) -> Pace:
    """Return how long trials take, from mostly start to mostly steps."""
    return Pace(
        before_s=chance.choice([1.0, 8.0, 30.0]) * chance.uniform(0.5, 1),
        warmup_s=chance.choice([0.0, 3.0]),
        step_s=chance.uniform(0.2, 2.0),
        after_s=chance.uniform(0.0, 3.0),
        steps=chance.randint(8, 24),
        slices=3 if sliced else 1,
    )
