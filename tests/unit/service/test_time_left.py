"""When an ablation starts and how long it still takes, against the sum by hand."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from service import time_left, waiting
from service.store.queue import Pace, QueuePlace
from service.waiting import Waiting, _Surroundings

NOTHING_HEARD = {"trials_starting": 0, "starting_s": 0.0, "steps_s": 0.0, "trials_over": 0, "trials_over_s": None}


def ablation(**given: Any) -> Any:
    row = {"id": "this", "node_class": "cpu", "settled_s": 0.0, "blocks_done": 0, "blocks_planned": 20}
    return SimpleNamespace(**(row | given))


def running(of: str, chance: random.Random, *, over: int = 0) -> Any:
    """Return a block of four trials, of which one starts and one makes steps."""
    told: dict[str, Any] = {
        "trials_waiting": 2,
        "trials_starting": 1,
        "starting_s": chance.uniform(0, 30),
        "trials_over": over,
    }
    told |= {"steps_s": chance.uniform(0, 50), "trials_over_s": chance.uniform(1, 90) if over else None}
    return ablation(ablation_id=of, name=of, trials_planned=80, **told)


def surroundings(paces: dict[str, Pace], blocks: Sequence[Any]) -> _Surroundings:
    own = {one.ablation_id: [block for block in blocks if block.ablation_id == one.ablation_id] for one in blocks}
    nothing: dict[str, Any] = {"places": {}, "holders": {}, "nodes": {}, "needs": {}}
    return _Surroundings(**nothing, paces=paces, running={"cpu": blocks}, own_running=own, silent_s=30)


def rest(block: Any, trial_s: float) -> float:
    start = trial_s - block.starting_s
    return float(2 * trial_s + (start if start > 0 else 0) + block.steps_s)


@pytest.mark.parametrize("seed", range(60))
def test_blocks_take_their_own_pace_then_that_of_their_trials_then_that_of_late(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    done, queued, over = chance.choice([0, 3]), chance.randint(0, 9), chance.choice([0, 2])
    row = ablation(settled_s=40.0 * done, blocks_done=done, blocks_queued=queued, trials_planned=80)
    blocks = [running(row.id, chance, over=over) for _ in range(chance.randint(0, 3))]
    known = chance.random() < 0.7
    around = surroundings({"cpu": Pace(block_s=99.0, trial_s=13.0)} if known else {}, blocks)
    told = chance.choice(
        [Waiting(), Waiting(waiting_for="a free node", starts_in_s=7.0), Waiting(waiting_for="a live node")]
    )
    found = waiting._with_time_left(row, around, told)
    heard = over * len(blocks)
    if not (done or known or heard) or told.waiting_for == "a live node":
        assert found == told, "nobody knows"
        return
    late_s = sum(block.trials_over_s for block in blocks) / heard if heard else 13.0
    trial_s = 10.0 if done else late_s
    expected = ends_by_hand([rest(block, trial_s) for block in blocks], queued, 4 * trial_s)
    expected += 7.0 if told.waiting_for else 0.0
    assert found.time_left_s == (pytest.approx(expected) if expected else None)
    assert (found.waiting_for, found.starts_in_s) == (told.waiting_for, told.starts_in_s)


def ends_by_hand(rests: Sequence[float], queued: int, block_s: float) -> float:
    """Give each queued block to the node that is free first."""
    nodes = sorted(rests) or [0.0]
    for _ in range(queued):
        nodes = sorted([nodes[0] + block_s, *nodes[1:]])
    return nodes[-1]


def test_what_has_taken_as_long_as_it_should_has_no_time_left() -> None:
    """Half a trial started 99 s ago where one takes 10: when it ends is not known, and nothing is said of it."""
    block = ablation(ablation_id="this", name="this", trials_planned=80, trials_waiting=0, **NOTHING_HEARD)
    block.trials_starting, block.starting_s = 1, 99.0
    row = ablation(settled_s=40.0, blocks_done=1, blocks_queued=0, trials_planned=80)
    assert waiting._with_time_left(row, surroundings({}, [block]), Waiting()).time_left_s is None
    block.trials_waiting = 1
    assert waiting._with_time_left(row, surroundings({}, [block]), Waiting()).time_left_s == pytest.approx(10)


@pytest.mark.parametrize("seed", range(50))
def test_the_next_block_starts_when_a_node_is_free_and_those_ahead_are_done(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    ahead, working = chance.randint(0, 9), chance.randint(1, 4)
    blocks = [running("other", chance) for _ in range(chance.randint(0, working))]
    around = surroundings({"cpu": Pace(block_s=60.0, trial_s=10.0)}, blocks)
    found = waiting._estimate("cpu", around, QueuePlace(blocks_ahead=ahead, rest_s=0), working)
    rests = [rest(block, 10.0) for block in blocks]
    assert found == pytest.approx((min(rests) if len(blocks) == working else 0) + 60.0 * ahead / working)


def test_the_end_is_never_before_what_runs_longest() -> None:
    assert time_left.last_end_s([1.0, 60.0], 0, 5.0) == 60.0
    assert time_left.last_end_s([1.0, 60.0], 3, 5.0) == 60.0
    assert time_left.last_end_s([], 3, 5.0) == 15.0
