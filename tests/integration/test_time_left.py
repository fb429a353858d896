"""The time left that is announced, through drawn histories of an ablation, against what is really left."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api_stack import Api, running_api
from tests.drawn_blocks import Clock, DrawnBlock, Pace, draw_pace

BLOCKS, ARMS = 6, 3
"""Of the factories' spec."""
EPS_S = 0.01


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    with made.told_by_sqlite():
        yield made


@pytest.fixture
def api(clock: Clock, tmp_path: Path) -> Iterator[Api]:
    with running_api("sqlite", tmp_path) as running:
        yield running


class History:
    """An ablation of which one node runs blocks."""

    def __init__(self, api: Api, clock: Clock, folder: Path, chance: random.Random) -> None:
        self.api, self.clock, self.folder, self.chance = api, clock, folder, chance
        self.node = api.register()
        self.path = api.submit()["links"]["self"]
        self.settled: list[float] = []
        """Seconds of the blocks that are done."""

    def left_s(self) -> float | None:
        """Return what the service announces."""
        found: float | None = self.api.get(self.path).json()["time_left_s"]
        return found

    def block(self, pace: Pace) -> DrawnBlock:
        """Claim the next block."""
        block = self.api.claim(self.node)
        assert block is not None
        beat_s = pace.trial_s * ARMS / self.chance.uniform(10, 30)
        return DrawnBlock(
            api=self.api, clock=self.clock, block=block, pace=pace, heartbeat_s=beat_s, folder=self.folder
        )

    def finish(self, pace: Pace) -> None:
        """Run a block to its end."""
        began, block = self.clock.now, self.block(pace)
        for _ in block.run():
            pass
        block.report(self.node)
        self.settled.append(self.clock.now - began)

    def break_one(self) -> None:
        """Let an attempt break after a while that has nothing to do with how long blocks take."""
        block = self.block(draw_pace(self.chance, sliced=False))
        self.clock.now += self.chance.uniform(1, 500)
        answer = self.api.attempt(block.block, "report", failure_class="preempted", message="wanted elsewhere")
        assert answer.status_code == 200, answer.text
        self.api.register()  # it was heard of


@pytest.fixture(params=range(3))
def history(api: Api, clock: Clock, tmp_path: Path, request: pytest.FixtureRequest) -> History:
    return History(api, clock, tmp_path / "work", random.Random(request.param))  # noqa: S311


@pytest.mark.parametrize("sliced", [False, True])
def test_at_a_constant_pace_it_is_right_at_every_moment_and_never_grows(history: History, *, sliced: bool) -> None:
    pace = draw_pace(history.chance, sliced=sliced)
    assert history.left_s() is None, "nothing was measured yet"
    history.finish(pace)
    block_s = pace.trial_s * ARMS
    assert history.settled == [pytest.approx(block_s)]
    for done in (1, 2):
        queued = (BLOCKS - done - 1) * block_s
        for _ in range(history.chance.randint(0, 2)):
            history.break_one()
            assert history.left_s() == pytest.approx(queued + block_s), "broken attempts are no pace"
        block, last = history.block(pace), queued + block_s + EPS_S
        for really_s in block.run():
            said = history.left_s() or 0.0
            after_s = pace.after_s * (ARMS if sliced else 1)
            assert really_s - after_s - EPS_S <= said - queued <= really_s + block.heartbeat_s + EPS_S
            assert said <= last + EPS_S, "it grew"
            last = said
        block.report(history.node)


def test_at_a_changing_pace_it_goes_by_what_settled_and_by_the_steps_of_now(history: History) -> None:
    """The oracle: what has not started takes as long as the mean settled trial, the rest as many steps as are left."""
    chance = history.chance
    for done in range(3):
        if history.settled:
            trial_s = sum(history.settled) / len(history.settled) / ARMS
            pace = replace(draw_pace(chance, sliced=False), step_s=chance.uniform(0.2, 6.0))
            block = history.block(pace)
            for _ in block.run():
                said = history.left_s() or 0.0
                told = block.told
                others_s = trial_s * (told.unstarted + ARMS * (BLOCKS - done - 1))
                least = told.steps_left * pace.step_s
                most = least + (trial_s if told.runs == "start" else 0.0)
                assert others_s + least - EPS_S <= said <= others_s + most + EPS_S
            history.api.attempt(block.block, "report", failure_class="preempted", message="only looked at")
        history.finish(draw_pace(chance, sliced=False))


def test_without_settled_blocks_trials_that_are_over_tell_the_pace(history: History) -> None:
    pace = replace(draw_pace(history.chance, sliced=False), after_s=0.0)
    block = history.block(pace)
    seen: list[tuple[float, Any]] = []
    for really_s in block.run():
        seen.append((really_s + (BLOCKS - 1) * ARMS * pace.trial_s, history.left_s()))
    first = [said for really, said in seen if really > ((BLOCKS * ARMS) - 1) * pace.trial_s]
    assert set(first) <= {None}, "no trial is over"
    lag = 1 + block.heartbeat_s / pace.trial_s
    later = [(really, said) for really, said in seen if said is not None]
    assert len(later) > len(seen) / 3
    for really, said in later:
        assert really / lag - pace.step_s - block.heartbeat_s <= said <= really * lag + block.heartbeat_s
