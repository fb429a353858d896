"""Curves of running ablations: where points lie, which blocks a band holds, and what is said of them in words."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from experiments.reporting.wording import duration
from service.web import live_curves
from service.web.live_curves import FRAME, QUANTITIES, TrialCurve, curves_of_steps, draw_arms, ticks

LOSS = QUANTITIES[0]


def places(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


@pytest.mark.parametrize("seed", range(40))
def test_lines_lie_in_the_plot_and_bands_hold_the_lines_of_their_blocks(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    arms = [f"arm-{place}" for place in range(chance.randint(1, 12))]
    scale, num_steps = 10.0 ** chance.randint(-9, 9), chance.randint(2, 400)
    steps = sorted(chance.sample(range(10**6), num_steps))
    blocks = chance.randint(0, 4)
    finished = [
        TrialCurve(arm, block, {step: chance.gauss(0, scale) for step in steps})
        for block in range(blocks)
        for arm in arms
    ]
    running = [
        TrialCurve(arm, blocks, {step: chance.gauss(0, scale) for step in steps[: chance.randint(0, num_steps)]})
        for arm in arms
    ]
    picture = draw_arms(LOSS, arms[: live_curves.MOST_ARMS], finished, running)
    if picture is None:
        assert not blocks
        assert all(len(one.curve) < 2 for one in running if one.arm in arms[: live_curves.MOST_ARMS])
        return
    for arm in picture.arms:
        lines = [places(text) for text in (arm.mean, arm.band, *arm.running) if text]
        assert all(FRAME.left - 0.1 <= x <= FRAME.width - FRAME.right + 0.1 for line in lines for x, _ in line)
        assert all(FRAME.top - 0.1 <= y <= FRAME.height - FRAME.bottom + 0.1 for line in lines for _, y in line)
        for line in [places(arm.mean), *map(places, arm.running)]:
            assert [x for x, _ in line] == sorted(x for x, _ in line), "no line runs backwards"
        assert bool(arm.band) == (blocks > 1)
        assert len(arm.running) == sum(one.arm == arm.arm and len(one.curve) > 1 for one in running)
        if arm.band:
            outline = places(arm.band)
            tops, bottoms = outline[: len(outline) // 2], outline[: len(outline) // 2 - 1 : -1]
            for (_, high), (_, mean), (_, low) in zip(tops, places(arm.mean), bottoms, strict=True):
                assert high - 0.11 <= mean <= low + 0.11
    assert picture.described.startswith("training loss, nats over the steps")


def test_a_band_and_a_mean_are_those_of_the_blocks() -> None:
    curves = [{1: 4.0, 2: 3.0, 3: 2.0}, {1: 5.0, 2: 3.5}, {1: 6.0, 2: 4.0, 3: 3.0}]
    finished = [TrialCurve("baseline", block, curve) for block, curve in enumerate(curves)]
    picture = draw_arms(LOSS, ["baseline"], finished, [])
    assert picture is not None
    (arm,) = picture.arms
    (first, second) = places(arm.mean)
    span = FRAME.height - FRAME.top - FRAME.bottom

    def at(value: float) -> float:
        return FRAME.height - FRAME.bottom - (value - 2.0) / 4.0 * span

    assert np.isclose([first[1], second[1]], [at(5.0), at(3.5)], atol=0.1).all(), "steps of all blocks only"
    assert places(arm.band)[0][1] == pytest.approx(at(6.0), abs=0.1)
    assert places(arm.band)[-1][1] == pytest.approx(at(4.0), abs=0.1)
    assert "mean over 3 finished blocks" in picture.note
    assert arm.newest == "3 at step 3 of block 3"


@pytest.mark.parametrize("seed", range(60))
def test_ticks_are_round_numbers_inside_of_the_range(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    low = chance.choice([0.0, chance.gauss(0, 1)]) * 10.0 ** chance.randint(-6, 9)
    high = low + 10.0 ** chance.uniform(-4, 9) * max(1e-3, abs(low))
    made = ticks(low, high)
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in made)
    assert 2 <= len(made) <= 7
    gaps = [b - a for a, b in pairwise(made)]
    assert max(gaps) - min(gaps) <= 1e-6 * max(gaps) + 1e-9 * max(map(abs, made))


def test_a_level_curve_lies_in_the_middle_and_a_lone_point_is_no_curve() -> None:
    picture = draw_arms(QUANTITIES[1], ["baseline"], [], [TrialCurve("baseline", 0, {1: 5.0, 2: 5.0, 3: 5.0})])
    assert picture is not None
    middle = (FRAME.top + FRAME.height - FRAME.bottom) / 2
    assert {y for _, y in places(picture.arms[0].running[0])} == {middle}
    assert draw_arms(LOSS, ["baseline"], [], [TrialCurve("baseline", 0, {8: 5.0})]) is None


def test_the_throughput_of_a_receipt_leaves_out_the_step_that_compiles_and_values_that_are_no_numbers() -> None:
    steps = [
        {"index": 0, "phase": "compile", "seconds": 60.0, "tokens": 100, "loss": 9.0},
        {"index": 1, "phase": "warmup", "seconds": 0.0, "tokens": 100, "loss": math.nan},
        {"index": 2, "phase": "timed", "seconds": 0.5, "tokens": 100},
        {"index": 3, "phase": "timed", "seconds": 0.25, "tokens": 100, "loss": 7.0},
    ]
    assert curves_of_steps(steps) == ({0: 9.0, 3: 7.0}, {2: 200.0, 3: 400.0})


def test_arms_beyond_the_most_are_named() -> None:
    arms = [f"v{place}" for place in range(live_curves.MOST_ARMS)]
    running = [TrialCurve(arm, 0, {1: 1.0, 2: 2.0}) for arm in arms]
    picture = draw_arms(LOSS, arms, [], running, left_out=["late"])
    assert picture is not None
    assert "1 more arm not drawn: late." in picture.note
    assert len({(arm.colour, arm.dash) for arm in picture.arms}) == len(arms)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-3, "0 s"), (0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5399, "90 min"), (5400, "2 h"), (172_800, "2 days")],
)
def test_durations_are_said_in_one_unit(seconds: float, said: str) -> None:
    assert duration(seconds).replace("\N{NO-BREAK SPACE}", " ") == said
