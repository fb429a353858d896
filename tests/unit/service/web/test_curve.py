"""Curves of running trials: where points lie, and what is said of them in words."""

import math
import random
from itertools import pairwise

import pytest

from experiments.reporting.wording import duration
from service.web import ablation_page


@pytest.mark.parametrize("seed", range(30))
def test_points_lie_in_the_box_and_keep_their_order(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    steps = sorted(chance.sample(range(10**6), chance.randint(2, 60)))
    scale = 10.0 ** chance.randint(-9, 9)
    values = [chance.choice([chance.gauss(0, scale), math.nan, math.inf, None]) for _ in steps]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    made = ablation_page.draw_curve("loss", steps, values)
    if len(finite) < 2:
        assert made is None
        return
    assert made is not None
    points = [tuple(map(float, pair.split(","))) for pair in made.points.split()]
    assert len(points) == len(finite)
    assert all(0 <= x <= ablation_page.WIDTH and 0 <= y <= ablation_page.HEIGHT for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    by_height = sorted(range(len(finite)), key=lambda place: points[place][1])
    assert all(finite[a] >= finite[b] - 2e-3 * (max(finite) - min(finite)) for a, b in pairwise(by_height))


def test_a_level_curve_is_a_line_in_the_middle() -> None:
    made = ablation_page.draw_curve("tokens/s", [1, 2, 3], [5.0, 5.0, 5.0])
    assert made is not None
    assert {pair.split(",")[1] for pair in made.points.split()} == {f"{ablation_page.HEIGHT / 2:.1f}"}
    assert made.described == "tokens/s over steps 1 to 3: from 5 to 5, now 5"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-3, "0 s"), (0, "0 s"), (99.4, "99 s"), (100, "2 min"), (5399, "90 min"), (5400, "2 h"), (172_800, "2 days")],
)
def test_durations_are_said_in_one_unit(seconds: float, said: str) -> None:
    assert duration(seconds).replace("\N{NO-BREAK SPACE}", " ") == said
