"""How long an ablation still takes, against the sum by hand."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service import waiting
from service.waiting import Waiting, _Surroundings


def surroundings(pace_s: dict[str, float]) -> _Surroundings:
    return _Surroundings(places={}, holders={}, nodes={}, needs={}, pace_s=pace_s, silent_s=30)


@pytest.mark.parametrize("seed", range(50))
def test_blocks_that_are_left_take_their_own_pace_over_the_nodes_that_run_them(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    done, queued, running = chance.choice([0, 3]), chance.randint(0, 9), chance.randint(0, 3)
    row = {"node_class": "cpu", "device_s": 40.0 * done, "blocks_done": done}
    row |= {"blocks_queued": queued, "blocks_running": running, "blocks_held": 5}
    around = surroundings({"cpu": 10.0} if chance.random() < 0.7 else {})
    told = chance.choice(
        [Waiting(), Waiting(waiting_for="a free node", starts_in_s=7.0), Waiting(waiting_for="a live node")]
    )
    found = waiting._with_time_left(cast(Any, SimpleNamespace(**row)), around, told)
    pace_s = 40.0 if done else around.pace_s.get("cpu")
    if pace_s is None or told.waiting_for == "a live node":
        assert found == told, "nobody knows"
        return
    blocks = [pace_s] * queued + [pace_s / 2] * running
    expected = sum(blocks) / (running or 1) + (7.0 if told.waiting_for else 0.0)
    assert found.time_left_s == pytest.approx(expected)
    assert (found.waiting_for, found.starts_in_s) == (told.waiting_for, told.starts_in_s)
