"""Curves of running ablations: which blocks a band holds, what is drawn, and what is said of it in words."""

import math
import random
from xml.etree import ElementTree

import pytest

from ablate.experiments.reporting.wording import duration
from ablate.service.web import live_curves
from ablate.service.web.live_curves import QUANTITIES, TrialCurve, curves_of_arm, curves_of_steps, draw_arms

LOSS = QUANTITIES[0]


@pytest.mark.parametrize("seed", range(20))
def test_bands_hold_the_lines_of_their_blocks_and_every_arm_is_drawn(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    arms = [f"arm-{place}" for place in range(chance.randint(1, live_curves.MOST_ARMS))]
    scale, num_steps = 10.0 ** chance.randint(-9, 30), chance.randint(2, 400)
    steps = sorted(chance.sample(range(10**6), num_steps))
    blocks = chance.randint(0, 4)
    finished = [
        TrialCurve(arm, block, {step: chance.gauss(0, scale) for step in steps if chance.random() < 0.9})
        for block in range(blocks)
        for arm in arms
    ]
    running = [
        TrialCurve(arm, blocks, {step: chance.gauss(0, scale) for step in steps[: chance.randint(0, num_steps)]})
        for arm in arms
    ]
    picture = draw_arms(LOSS, arms, finished, running)
    with_line = [arm for arm in arms if any(one.arm == arm and len(one.curve) > 1 for one in (*finished, *running))]
    assert [entry.arm for entry in picture.legend] == with_line if picture else not with_line
    if picture is None:
        return
    svg = ElementTree.fromstring(picture.svg)  # noqa: S314  # our own
    assert svg.findtext("title") == LOSS.label
    assert all(f"{entry.arm}: {entry.newest}" in str(svg.findtext("desc")) for entry in picture.legend)
    assert all(f"var({entry.colour})" in picture.svg for entry in picture.legend)
    for arm in with_line:
        done = [one.curve for one in finished if one.arm == arm and len(one.curve) > 1]
        curves = curves_of_arm(arm, [TrialCurve(arm, 0, curve) for curve in done], [])
        common = [step for step in steps if done and all(step in curve for curve in done)]
        assert curves is None or list(curves.mean) == common
        for step in common:
            values = [curve[step] for curve in done]
            assert curves is not None
            assert (curves.low[step], curves.high[step]) == (min(values), max(values))
            assert curves.mean[step] == pytest.approx(sum(values) / len(values), abs=1e-9 * scale)


def test_a_band_and_a_mean_are_those_of_the_blocks() -> None:
    curves = [{1: 4.0, 2: 3.0, 3: 2.0}, {1: 5.0, 2: 3.5}, {1: 6.0, 2: 4.0, 3: 3.0}]
    finished = [TrialCurve("baseline", block, curve) for block, curve in enumerate(curves)]
    arm = curves_of_arm("baseline", finished, [])
    assert arm is not None
    assert (arm.low, arm.mean, arm.high) == ({1: 4.0, 2: 3.0}, {1: 5.0, 2: 3.5}, {1: 6.0, 2: 4.0})
    picture = draw_arms(LOSS, ["baseline"], finished, [])
    assert picture is not None
    assert "mean over 3 finished blocks" in picture.note
    assert picture.legend[0].newest == "3 at step 3 of block 3"


def test_a_level_curve_is_drawn_and_a_lone_point_is_no_curve() -> None:
    assert draw_arms(QUANTITIES[1], ["baseline"], [], [TrialCurve("baseline", 0, {1: 5.0, 2: 5.0, 3: 5.0})]) is not None
    assert draw_arms(LOSS, ["baseline"], [], [TrialCurve("baseline", 0, {8: 5.0})]) is None


def test_names_of_arms_are_escaped() -> None:
    picture = draw_arms(LOSS, ["<b>&"], [], [TrialCurve("<b>&", 0, {1: 1.0, 2: 2.0})])
    assert picture is not None
    assert "<b>" not in picture.svg
    assert "<b>&: 2 at step 2" in str(ElementTree.fromstring(picture.svg).findtext("desc"))  # noqa: S314


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
    assert len({(entry.colour, entry.dash) for entry in picture.legend}) == len(arms)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5399, "90 min"), (5400, "2 h"), (172_800, "2 days")],
)
def test_durations_are_said_in_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds).replace("\N{NO-BREAK SPACE}", " ") == text
