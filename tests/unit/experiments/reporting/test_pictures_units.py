"""What the pictures' axes say, read back from the SVG: markers, lines and intervals in the verdict's own unit."""

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import pytest

from ablate.experiments.analysis.verdicts import Comparison
from ablate.experiments.reporting.pictures import differences, forest, trials
from ablate.experiments.reporting.view import AblationView
from tests import views

ANCHORS = {"x": "middle", "y": "end"}
"""Of tick labels."""
POINT = re.compile(r"(-?[\d.]+) (-?[\d.]+)")


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a drawn SVG, in the units of its own tick labels."""

    element: ElementTree.Element

    def labels(self, axis: str) -> list[str]:
        """Return the tick labels of "x" or "y"."""
        texts = [group.find("./text") for group in self.element.iter("g")]
        style = f"text-anchor: {ANCHORS[axis]}; fill: var(--soft)"
        return [str(text.text) for text in texts if text is not None and style in text.get("style", "")]

    def value(self, axis: str, place: float) -> float:
        """Return what the axis "x" or "y" says at a place in the SVG, by its first and last tick."""
        ticks: dict[float, float] = {}
        for group in self.element.iter("g"):
            labels, marks = group.findall("./g/text"), group.findall("./g/g/use")
            if len(labels) == len(marks) == 1 and f"text-anchor: {ANCHORS[axis]}" in labels[0].get("style", ""):
                number = str(labels[0].text).replace("\N{MINUS SIGN}", "-")
                ticks[float(marks[0].get(axis, ""))] = float(number)
        first, last = min(ticks), max(ticks)
        return ticks[first] + (place - first) * (ticks[last] - ticks[first]) / (last - first)

    def markers(self, axis: str) -> list[float]:
        """Return the values of the markers on "x" or "y", from left to right."""
        drawn = [use for use in self.element.iter("use") if "stroke: var(--paper)" in use.get("style", "")]
        drawn.sort(key=lambda use: float(use.get("x", "")))
        return [self.value(axis, float(use.get(axis, ""))) for use in drawn]

    def paths(self, style: str, axis: str = "y") -> list[list[float]]:
        """Return the values at the corners of every path in this style."""
        lines = [path.get("d", "") for path in self.element.iter("path") if style in path.get("style", "")]
        return [[self.value(axis, float(xy["xy".index(axis)])) for xy in POINT.findall(path)] for path in lines]

    @property
    def line(self) -> float:
        """Value of the one line in ink."""
        (corners,) = self.paths("stroke: var(--ink)")
        return corners[0]

    @property
    def tint(self) -> tuple[float, float]:
        """Bounds of the one tinted band."""
        (corners,) = self.paths("fill: var(--ink)")
        return min(corners), max(corners)


def panels(svg: str) -> list[Panel]:
    figure = ElementTree.fromstring(svg).find("g")  # noqa: S314  # our own output
    assert figure is not None
    return [Panel(axes) for axes in list(figure)[1:]]


def difference_panels(view: AblationView) -> list[Panel]:
    picture = differences.differences(view)
    assert picture is not None
    return panels(picture.svg)


def comparisons(view: AblationView) -> list[Comparison]:
    """Return those of all variants, the largest improvement first."""
    assert view.verdict is not None
    assert view.answer is not None
    judged = {variant.arm: variant.primary for variant in view.verdict.variants}
    primaries = [judged[variant.arm] for variant in view.answer.variants]
    return [primary for primary in primaries if primary is not None]


@pytest.mark.parametrize("primary", ["tokens_per_s", "step_s"])
@pytest.mark.parametrize("seed", range(3))
def test_differences_are_drawn_in_the_percents_of_the_verdict(seed: int, primary: str) -> None:
    chance = random.Random(seed)  # noqa: S311  # not for secrets
    speeds = {"slow": chance.uniform(-40, -15), "fast": chance.uniform(15, 60)}
    arms = {"baseline": views.Effect()} | {
        name: views.Effect(gates={"chunk_size": 8 * (4 + 4 * i)}, speed_pct=speed)
        for i, (name, speed) in enumerate(speeds.items())
    }
    view = views.cpu_view(arms=arms, noise=0.08, primary=primary)
    drawn, judged = difference_panels(view), comparisons(view)
    assert len(judged) == 2
    for panel, comparison in zip(drawn, judged, strict=False):
        started = {block: i for i, block in enumerate(dict.fromkeys(r.ids.block_index for r in view.receipts))}
        in_time = sorted(range(comparison.blocks), key=lambda block: started[block])
        assert panel.markers("y") == pytest.approx([comparison.differences_pct[block] for block in in_time], abs=1e-3)
        assert panel.line == pytest.approx(comparison.delta_pct, abs=1e-3)
        assert panel.tint == pytest.approx((comparison.ci_low_pct, comparison.ci_high_pct), abs=1e-3)
        mean_log = sum(math.log1p(marker / 100) for marker in panel.markers("y")) / comparison.blocks
        assert panel.line == pytest.approx(100 * math.expm1(mean_log), abs=1e-2)


def test_differences_of_an_unfinished_ablation_have_the_same_unit() -> None:
    whole = views.cpu_view(
        arms={"baseline": views.Effect(), "slow": views.Effect(gates={"chunk_size": 32}, speed_pct=-30)}
    )
    (comparison,) = comparisons(whole)
    (panel, _load) = difference_panels(views.first_blocks(whole, 4))
    assert panel.markers("y") == pytest.approx(comparison.differences_pct[:4], abs=1e-3)


def forest_panel(view: AblationView) -> Panel:
    picture = forest.forest(view)
    assert picture is not None
    return panels(picture.svg)[0]


def test_forest_draws_effect_and_intervals_where_the_verdict_has_them() -> None:
    view = views.view()
    panel, judged = forest_panel(view), comparisons(view)
    assert panel.markers("x") == pytest.approx(sorted(one.delta_pct for one in judged), abs=1e-3)
    for i, one in enumerate(judged, 1):
        wide, narrow = panel.paths(f"fill: none; stroke: var(--arm-{i})", "x")
        assert wide == pytest.approx([one.ci_low_pct, one.ci_high_pct], abs=1e-3)
        assert narrow == pytest.approx([one.tost_low_pct, one.tost_high_pct], abs=1e-3)


def test_a_variant_far_away_leaves_the_scale_to_the_others() -> None:
    arms = {"baseline": views.Effect(), "far": views.Effect(gates={"chunk_size": 32}, speed_pct=-30)}
    near = {
        "larger": views.Effect(gates={"chunk_size": 64}, speed_pct=1.0),
        "cached": views.Effect(gates={"psiv_cache": True}, speed_pct=2.0),
    }
    view = views.cpu_view(arms={**arms, **near})
    picture = forest.forest(view)
    assert picture is not None
    caption = picture.caption.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")
    (far,) = (one for one in comparisons(view) if one.delta_pct < -25)
    assert f"beyond the scale, far ({far.ci_low_pct:.2f} % to {far.ci_high_pct:.2f} %)." in caption
    panel = forest_panel(view)
    shown = [float(label.replace("\N{MINUS SIGN}", "-")) for label in panel.labels("x") if label[-1].isdigit()]
    assert min(shown) > -10, "the scale is that of the others"
    near_ones = [one for one in comparisons(view) if abs(one.delta_pct) < 10]
    assert len(near_ones) == 2
    assert all(any(abs(x - one.delta_pct) < 1e-3 for x in panel.markers("x")) for one in near_ones)


def test_variants_of_one_order_share_a_scale() -> None:
    arms = {"baseline": views.Effect(), "slow": views.Effect(gates={"chunk_size": 32}, speed_pct=-30)}
    both = {**arms, "fast": views.Effect(gates={"chunk_size": 64}, speed_pct=8)}
    for shown in (arms, both):
        picture = forest.forest(views.cpu_view(arms=shown))
        assert picture is not None
        assert "beyond the scale" not in picture.caption


@pytest.mark.parametrize(
    ("primary", "bound", "shown"), [("tokens_per_s", 1.5, "+1.50"), ("step_s", -1.5, "\N{MINUS SIGN}1.50")]
)
def test_the_adoption_line_stands_where_the_metric_improves(primary: str, bound: float, shown: str) -> None:
    view = views.cpu_view(primary=primary)
    (corners,) = forest_panel(view).paths("stroke-dasharray", "x")
    assert corners[0] == pytest.approx(bound, abs=1e-3)
    picture = forest.forest(view)
    assert picture is not None
    assert f"adopt from {shown}\N{NO-BREAK SPACE}%" in picture.caption


def test_pictures_name_blocks_as_people_count_them() -> None:
    view = views.view(num_blocks=6)
    steps = trials.step_times(view)
    assert steps is not None
    for last in (difference_panels(view)[-1], panels(steps.svg)[-1]):
        assert [label for label in last.labels("x") if label.isdigit()] == ["1", "2", "3", "4", "5", "6"]
