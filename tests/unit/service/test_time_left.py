"""When an ablation starts and how long it still takes, against the sum by hand."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from service import waiting
from service.store.queue import Pace, QueuePlace
from service.waiting import Waiting, _Surroundings


def ablation(**given: Any) -> Any:
    row = {"id": "this", "node_class": "cpu", "device_s": 0.0, "blocks_done": 0, "blocks_planned": 20}
    return SimpleNamespace(**(row | given))


def surroundings(paces: dict[str, Pace], running: Sequence[tuple[str, float]]) -> _Surroundings:
    blocks = [ablation(ablation_id=of, runs_s=ran, trials_planned=40) for of, ran in running]
    own = {of: [block for block in blocks if block.ablation_id == of] for of, _ in running}
    nothing: dict[str, Any] = {"places": {}, "holders": {}, "nodes": {}, "needs": {}}
    return _Surroundings(**nothing, paces=paces, running={"cpu": blocks}, own_running=own, silent_s=30)


@pytest.mark.parametrize("seed", range(50))
def test_blocks_take_their_own_pace_or_that_of_late_by_their_trials(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    done, queued, arms, planned = chance.choice([0, 3]), chance.randint(0, 9), chance.randint(2, 13), 20
    row = ablation(device_s=40.0 * done, blocks_done=done, blocks_queued=queued, trials_planned=arms * planned)
    runs = [chance.uniform(0, 200) for _ in range(chance.randint(0, 3))]
    known = chance.random() < 0.7
    around = surroundings({"cpu": Pace(block_s=99.0, trial_s=10.0)} if known else {}, [(row.id, one) for one in runs])
    told = chance.choice(
        [Waiting(), Waiting(waiting_for="a free node", starts_in_s=7.0), Waiting(waiting_for="a live node")]
    )
    found = waiting._with_time_left(row, around, told)
    if not (done or known) or told.waiting_for == "a live node":
        assert found == told, "nobody knows"
        return
    block_s = 40.0 if done else 10.0 * arms
    rests = [block_s - ran if block_s - ran > ran / 2 else ran / 2 for ran in runs]
    expected = (block_s * queued + sum(rests)) / (len(runs) or 1) + (7.0 if told.waiting_for else 0.0)
    assert found.time_left_s == pytest.approx(expected)
    assert (found.waiting_for, found.starts_in_s) == (told.waiting_for, told.starts_in_s)


@pytest.mark.parametrize("seed", range(50))
def test_the_next_block_starts_when_a_node_is_free_and_those_ahead_are_done(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    ahead, working = chance.randint(0, 9), chance.randint(1, 4)
    runs = [chance.uniform(0, 200) for _ in range(chance.randint(0, working))]
    around = surroundings({"cpu": Pace(block_s=60.0, trial_s=10.0)}, [("other", one) for one in runs])
    found = waiting._estimate("cpu", around, QueuePlace(blocks_ahead=ahead, rest_s=0), working)
    rests = [max(20.0 - ran, ran / 2) for ran in runs]  # of two trials each
    assert found == pytest.approx((min(rests) if len(runs) == working else 0) + 60.0 * ahead / working)
