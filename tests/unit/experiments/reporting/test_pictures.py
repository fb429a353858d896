"""Pictures: what each draws, that themes replace every sentinel colour, and what is drawn when data is missing."""

import dataclasses
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.markers import MarkerStyle

from ablate.experiments.outcomes import AblationState
from ablate.experiments.reporting.pictures import differences, drawing, forest, memory, registry, trials
from ablate.experiments.reporting.pictures.drawing import ArmStyle
from ablate.experiments.reporting.pictures.theme import SHADES
from ablate.experiments.reporting.view import AblationView
from tests import views


def without(view: AblationView, **changes: object) -> AblationView:
    """Copy the view with fields of every receipt replaced."""
    trials = tuple(
        dataclasses.replace(trial, receipt=trial.receipt and trial.receipt.model_copy(update=changes))
        for trial in view.trials
    )
    return dataclasses.replace(view, trials=trials)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_colour_can_be_told_from_the_paper(theme: str) -> None:
    paper = getattr(SHADES["paper"], theme)
    for role, shade in SHADES.items():
        if role in {"ink", "soft"}:
            assert contrast(getattr(shade, theme), paper) >= 4.5, role
        elif role.startswith("arm") or role == "limit":
            assert contrast(getattr(shade, theme), paper) >= 3.0, role


def test_draw_all_draws_each_picture_once_with_theme_colours_only() -> None:
    drawn = registry.draw_all(views.traced(views.view(val_every=4)))
    assert len({picture.name for picture in drawn}) == len(drawn) == len(registry.DRAWN) - 1
    assert "logged" not in {picture.name for picture in drawn}, "no program logged"
    for picture in drawn:
        colours = set(re.findall(r"(?:fill|stroke|background): ?([^;\"]+)", picture.svg))
        assert colours <= {f"var(--{role})" for role in SHADES} | {"none"} | _clip_only(picture.svg), picture.name
        assert not re.search("#0102", picture.svg)


def _clip_only(text: str) -> set[str]:
    """Return references to hatch patterns, the only fill that is no colour."""
    return {f"url(#{name})" for name in re.findall(r"fill: ?url\(#([^)]*)\)", text)}


def test_standalone_is_well_formed_and_carries_its_colours() -> None:
    for picture in registry.draw_all(views.traced(views.view(val_every=4))):
        root = ElementTree.fromstring(picture.standalone())  # noqa: S314  # our own output
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "--arm-1" in picture.standalone()
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        assert len(ids) == len(set(ids))
        assert all(str(name).startswith(f"{picture.name}-") for name in ids)


def test_every_marker_can_be_seen_as_well_as_a_circle() -> None:
    """By the area that a marker of the forest leaves inside its edge, which has the paper's colour."""

    def seen(style: ArmStyle) -> float:
        drawn = MarkerStyle(style.marker)
        size = forest.MARKER_PT * style.grown
        (outline,) = drawn.get_path().transformed(drawn.get_transform()).to_polygons()
        ends = list(pairwise((size * float(x), size * float(y)) for x, y in np.asarray(outline)))
        area = abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in ends)) / 2
        return area - sum(math.dist(one, other) for one, other in ends) / 2  # half of an edge of one point is inside

    styles = drawing.arm_styles([f"arm-{i}" for i in range(2 * len(drawing.MARKERS))])
    areas = {style.marker: seen(style) for style in styles.values()}
    assert len(areas) == len(drawing.MARKERS)
    assert min(areas.values()) > 0.7 * areas["o"], areas


def test_differences_are_drawn_of_the_variants_with_the_largest_improvements() -> None:
    view = views.view(arms=views.many(12), node_class="cpu", num_blocks=6, timed=4, noise=0.0001)
    assert view.answer is not None
    best = [variant.arm for variant in view.answer.variants][: differences.MOST_PANELS]
    assert set(best).isdisjoint({"v00", "v01"}), "the best are not the first of the spec"
    picture = differences.differences(view)
    assert picture is not None
    panels = re.findall(r">(v\d\d)</text>", picture.svg)
    assert panels[: len(best)] == best


def test_forest_states_effect_interval_margin_and_adoption() -> None:
    view = views.view()
    picture = forest.forest(view)
    assert picture is not None
    assert view.verdict is not None
    shown = picture.svg
    labels = [name for name in re.findall(r"<text[^>]*>([^<]*)</text>", shown) if name in view.plan.arm_by_name]
    assert view.answer is not None
    assert labels == [variant.arm for variant in view.answer.variants]
    assert labels[:2] == ["psiv-on", "chunk-32"]
    assert "var(--band)" in shown
    caption = picture.caption.replace("\N{NO-BREAK SPACE}", " ")
    assert "margin of 0.5 %" in caption
    assert "adopt from +1.50 %" in caption


def test_differences_show_the_clock_or_the_load_or_neither() -> None:
    clocked, loaded = differences.differences(views.view()), differences.differences(views.cpu_view())
    assert clocked is not None
    assert "median device clock" in clocked.caption
    assert loaded is not None
    assert "load average" in loaded.caption
    blind = views.cpu_view()
    trial = blind.trials[0]
    assert trial.receipt is not None
    environment = trial.receipt.environment.model_copy(update={"load_average_before": None})
    neither = differences.differences(without(blind, environment=environment))
    assert neither is not None
    assert "Bottom" not in neither.caption


def test_pictures_are_left_out_where_their_data_is_missing() -> None:
    assert registry.draw_all(views.unfinished(AblationState.QUEUED)) == ()
    running = {picture.name for picture in registry.draw_all(views.unfinished(AblationState.RUNNING, done_blocks=1))}
    assert {"differences", "steps", "losses", "memory"} <= running
    assert "forest" not in running
    assert memory.memory(without(views.cpu_view(), memory=None)) is None
    assert trials.step_times(without(views.cpu_view(), steps=())) is None


def test_memory_draws_the_limit_only_where_it_fits_the_scale() -> None:
    near, far = memory.memory(views.view()), memory.memory(views.cpu_view())
    assert near is not None
    assert "device limit" in near.svg
    assert "out of memory" in near.svg
    assert far is not None
    assert "device limit" not in far.svg
    assert "16.00\N{NO-BREAK SPACE}GiB, far beyond this scale" in far.caption


def test_non_finite_samples_are_skipped() -> None:
    view = views.traced(views.cpu_view(val_every=2))
    trials = []
    for trial in view.trials:
        assert trial.receipt is not None
        broken = trial.receipt.steps[5].model_copy(update={"loss": math.nan, "seconds": math.inf})
        steps = (*trial.receipt.steps[:5], broken, *trial.receipt.steps[6:])
        trials.append(dataclasses.replace(trial, receipt=trial.receipt.model_copy(update={"steps": steps})))
    drawn = registry.draw_all(dataclasses.replace(view, trials=tuple(trials)))
    assert len(drawn) == len(registry.DRAWN) - 1, "no program logged"
    assert not any(re.search(r"\bnan\b|\binf\b", picture.svg) for picture in drawn)


def test_many_variants_are_capped_and_counted() -> None:
    view = views.view(arms=views.many(33), node_class="cpu", num_blocks=6, timed=3)
    drawn, blocks = forest.forest(view), differences.differences(view)
    assert drawn is not None
    assert "3 more variants are in the table only" in drawn.caption
    assert blocks is not None
    assert "25 more variants" in blocks.caption
