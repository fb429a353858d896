"""When an ablation starts and how long it still takes, against the sum by hand."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from service.queue import time_left, waiting
from service.queue.waiting import Waiting, _Surroundings
from service.store.ablations.queue import Pace, QueuePlace
from service.store.nodes.placement import Needs

NOTHING_HEARD = {"trials_starting": 0, "starting_s": 0.0, "steps_s": 0.0, "trials_over": 0, "trials_over_s": None}


def ablation(**given: Any) -> Any:
    row = {"id": "this", "node_class": "cpu", "settled_s": 0.0, "blocks_done": 0, "blocks_planned": 20}
    row |= {"device_minutes": 1e6, "device_s": 0.0}
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


def surroundings(
    paces: dict[str, Pace], blocks: Sequence[Any], *, nodes: int = 0, between: int | None = None
) -> _Surroundings:
    own = {one.ablation_id: [block for block in blocks if block.ablation_id == one.ablation_id] for one in blocks}
    well = {
        "node_class": "cpu",
        "revoked": False,
        "quarantined_reason": None,
        "draining": False,
        "silent_s": 0,
        "lanes": None,
        "num_devices": 1,
    }
    known = [SimpleNamespace(name=f"node-{number}", **well) for number in range(nodes)]
    places = {} if between is None else {"this": QueuePlace(blocks_ahead=0, blocks_between=between, rest_s=0)}
    told: dict[str, Any] = {"places": places, "nodes": {"cpu": known}}
    told |= {"holders": {}, "needs": {"this": Needs(lanes="", devices=1)}}
    return _Surroundings(**told, paces=paces, running={"cpu": blocks}, own_running=own, silent_s=30)


def rest(block: Any, trial_s: float) -> float:
    start = trial_s - block.starting_s
    return float(2 * trial_s + (start if start > 0 else 0) + block.steps_s)


@pytest.mark.parametrize("seed", range(60))
def test_blocks_take_their_own_pace_then_that_of_their_trials_then_that_of_late(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    done, queued, over = chance.choice([0, 3]), chance.randint(0, 9), chance.choice([0, 2])
    row = ablation(settled_s=40.0 * done, blocks_done=done, blocks_queued=queued, trials_planned=80)
    blocks = [running(row.id, chance, over=over) for _ in range(chance.randint(0, 3))]
    others = [running("other", chance, over=2) for _ in range(chance.randint(0, 2))]
    known, nodes, between = chance.random() < 0.7, chance.randint(0, 4), chance.choice([0, 0, 1, 7, 40])
    paces = {"cpu": Pace(block_s=99.0, trial_s=13.0)} if known else {}
    around = surroundings(paces, [*blocks, *others], nodes=nodes, between=between if queued else None)
    told = chance.choice(
        [Waiting(), Waiting(waiting_for="a free node", starts_in_s=7.0), Waiting(waiting_for="a live node")]
    )
    found = waiting._with_time_left(row, around, told)
    heard = over * len(blocks)
    if not (done or known or heard) or told.waiting_for == "a live node" or (queued and between and not known):
        assert found == told, "nobody knows"
        return
    late_s = sum(block.trials_over_s for block in blocks) / heard if heard else 13.0
    trial_s = 10.0 if done else late_s
    own = [rest(block, trial_s) for block in blocks]
    busy = own + [rest(block, block.trials_over_s / 2) for block in others]
    jobs = [99.0] * between + [4 * trial_s] * queued
    expected = max([*own, ends_by_hand(busy, nodes, jobs) if queued else 0.0])
    assert found.time_left_s == (pytest.approx(expected) if expected else None)
    assert (found.waiting_for, found.starts_in_s) == (told.waiting_for, told.starts_in_s)


def ends_by_hand(rests: Sequence[float], nodes: int, jobs: Sequence[float]) -> float:
    """Give each block to the node that is free first, and return when the last of them ends."""
    free = sorted([*rests, *[0.0] * (max(1, nodes) - len(rests))])
    last = 0.0
    for job in jobs:
        last = free.pop(0) + job
        free = sorted([*free, last])
    return last


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
    found = waiting._estimate("cpu", around, QueuePlace(blocks_ahead=ahead, blocks_between=ahead, rest_s=0), working)
    rests = [rest(block, 10.0) for block in blocks]
    assert found == pytest.approx((min(rests) if len(blocks) == working else 0) + 60.0 * ahead / working)


@pytest.mark.parametrize("seed", range(100))
def test_many_equal_blocks_are_given_out_as_one_by_one(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    rests = [chance.choice([0.0, 5.0, chance.uniform(0, 90)]) for _ in range(chance.randint(0, 5))]
    nodes = chance.randint(0, 6)
    jobs = [(chance.choice([0, 1, 3, 50]), chance.choice([0.0, 1.0, chance.uniform(0, 40)])) for _ in range(3)]
    each = [each_s for count, each_s in jobs for _ in range(count)]
    assert time_left.last_end_s(rests, nodes, jobs) == pytest.approx(ends_by_hand(rests, nodes, each))


@pytest.mark.parametrize("seed", range(200))
def test_blocks_that_the_budget_does_not_allow_take_no_time(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    block_s, budget_s = chance.uniform(1, 30), chance.choice([-5.0, 0.0, chance.uniform(0, 200)])
    queued, nodes = chance.randint(0, 12), chance.randint(1, 4)
    running = chance.randint(0, nodes)
    left, ended, begun, busy = queued, 0.0, 0, running
    while True:
        while busy < nodes and left and ended < budget_s:
            left, begun, busy = left - 1, begun + 1, busy + 1
        if not busy:
            break
        busy, ended = busy - 1, ended + block_s
    assert time_left.affordable(queued, running, block_s=block_s, budget_s=budget_s, nodes=nodes) == begun


def test_the_time_left_is_no_more_than_the_budget_allows() -> None:
    """12 s are allowed and a block takes 10: of ten that wait the second is the last that starts."""
    row = ablation(settled_s=0.0, blocks_queued=10, blocks_planned=10, trials_planned=20, device_minutes=0.2)
    around = surroundings({"cpu": Pace(block_s=10.0, trial_s=5.0)}, [], nodes=1, between=0)
    assert waiting._with_time_left(row, around, Waiting()).time_left_s == pytest.approx(20)
    row.device_s = 12.0
    assert waiting._with_time_left(row, around, Waiting()).time_left_s is None
