"""Curves of an ablation that runs: loss and throughput over the steps, all arms in one picture, a band over blocks."""

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cachetools import LRUCache, TTLCache, cached
from markupsafe import Markup
from sqlalchemy import Connection

from ablate.experiments.block_numbers import block_name
from ablate.experiments.reporting import wording
from ablate.service.store.ablations import results
from ablate.service.store.nodes import nodes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ablate.experiments.reporting.pictures.drawing import ArmStyle

WIDTH_IN, HEIGHT_IN = 5.8, 2.6
FRESH_S = 5.0
"""Age up to which all viewers get the same pictures: a drawing takes 0.1 s of a processor that may be measuring."""
MOST_ARMS = 9
MOST_BLOCKS = 12
"""Finished blocks in a band, the newest; each of their receipts is read once."""
MOST_POINTS = 120
"""Steps of a curve that are drawn, evenly spread."""
DASHES = {"-": "none", "--": "7 3", "-.": "8 2.5 2 2.5", ":": "2 2.5"}
"""Line style of a picture -> dashes of its line in the legend."""
OPACITY = 0.14
_STEPS = (1, 2, 5, 10)
"""Of the numbers at an axis."""

Curve = Mapping[int, float]
"""Step -> value."""


class TrialCurve(NamedTuple):
    """One quantity of one trial."""

    arm: str
    block_index: int
    curve: Curve


@dataclass(frozen=True, kw_only=True)
class ArmCurves:
    """The curves of an arm in a picture."""

    arm: str
    low: Curve
    """Smallest values of the finished blocks, at the steps that all of them have."""
    mean: Curve
    high: Curve
    running: tuple[Curve, ...]
    newest: str
    """The newest value with its step and block."""


class LegendEntry(NamedTuple):
    """An arm in the legend below a picture."""

    arm: str
    colour: str
    """Of the page's theme."""
    dash: str
    newest: str


@dataclass(frozen=True, kw_only=True)
class LivePicture:
    """One quantity of all arms over the steps."""

    label: str
    """With the unit."""
    svg: Markup
    legend: tuple[LegendEntry, ...]
    note: str


class Quantity(NamedTuple):
    """What a picture shows."""

    name: str
    label: str
    in_heartbeat: str


QUANTITIES = (
    Quantity("loss", "training loss", "loss"),
    Quantity("speed", "throughput, tokens/s", "tokens_per_s"),
)


@cached(
    TTLCache(maxsize=500, ttl=FRESH_S),
    key=lambda _connection, ablation_id, _arms: ablation_id,
    condition=threading.Condition(),
)
def live_curves(connection: Connection, ablation_id: str, arms: Sequence[str]) -> tuple[LivePicture, ...]:
    """Return the pictures that have data: the finished blocks, and the running ones in their running attempt."""
    shown = arms[:MOST_ARMS]
    finished = list(_finished(connection, ablation_id))
    running = list(_running(connection, ablation_id, len(arms)))
    pictures = (
        draw_arms(
            one, shown, [done[place] for done in finished], [now[place] for now in running], left_out=arms[MOST_ARMS:]
        )
        for place, one in enumerate(QUANTITIES)
    )
    return tuple(picture for picture in pictures if picture is not None)


def _finished(connection: Connection, ablation_id: str) -> Iterator[tuple[TrialCurve, ...]]:
    for row in results.newest_receipts(connection, ablation_id, num_blocks=MOST_BLOCKS):
        curves = _curves_of(connection, row.trial_id, row.digest)
        yield tuple(TrialCurve(row.arm, row.block_index, curve) for curve in curves)


def _running(connection: Connection, ablation_id: str, limit: int) -> Iterator[tuple[TrialCurve, ...]]:
    for row in nodes.trials_of_running_blocks(connection, ablation_id, limit=limit):
        beats = nodes.heartbeats(connection, row.id)
        yield tuple(
            TrialCurve(
                row.arm, row.block_index, _finite((beat["steps_done"], beat[one.in_heartbeat]) for beat in beats)
            )
            for one in QUANTITIES
        )


@cached(LRUCache(maxsize=2000), key=lambda _connection, _trial_id, digest: digest, lock=threading.Lock())
def _curves_of(connection: Connection, trial_id: str, _digest: str) -> tuple[Curve, ...]:
    return curves_of_steps(json.loads(results.read_payload(connection, trial_id))["steps"])


def curves_of_steps(steps: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """Return the quantities of a receipt's steps; step 0 has no throughput, since it compiles."""
    rates = (
        (step["index"], step["tokens"] / step["seconds"] if step["seconds"] > 0 else None)
        for step in steps
        if step["phase"] != "compile"
    )
    return _finite((step["index"], step.get("loss")) for step in steps), _finite(rates)


def _finite(points: Iterable[tuple[int, float | None]]) -> Curve:
    return {step: value for step, value in points if value is not None and math.isfinite(value)}


def draw_arms(
    quantity: Quantity,
    arms: Sequence[str],
    finished: Sequence[TrialCurve],
    running: Sequence[TrialCurve],
    *,
    left_out: Sequence[str] = (),
) -> LivePicture | None:
    """Return the picture of one quantity; None without two points of one trial."""
    from matplotlib.ticker import MaxNLocator  # matplotlib would add a second to the API's start

    from ablate.experiments.reporting.pictures import drawing

    finished = [one for one in finished if one.arm in arms and len(one.curve) > 1]
    running = [one for one in running if one.arm in arms and len(one.curve) > 1]
    curves = [one for arm in arms if (one := curves_of_arm(arm, finished, running)) is not None]
    if not curves:
        return None
    styles = drawing.arm_styles(arms)

    def paint(figure: "Figure") -> None:
        figure.set_size_inches(WIDTH_IN, HEIGHT_IN)
        axes = figure.add_subplot()
        for one in curves:
            _draw(axes, one, styles[one.arm])
        axes.set_xlabel("step")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.grid(axis="y")
        axes.set_axisbelow(True)

    newest = "; ".join(f"{one.arm}: {one.newest}" for one in curves)
    described = f"{quantity.label} over the steps, all arms. Newest: {newest}."
    return LivePicture(
        label=quantity.label,
        svg=Markup(drawing.draw(quantity.name, quantity.label, described, paint).svg),  # noqa: S704  # it escapes texts
        legend=tuple(
            LegendEntry(one.arm, f"--{styles[one.arm].role}", DASHES[styles[one.arm].line], one.newest)
            for one in curves
        ),
        note=_note(len({one.block_index for one in finished}), running, left_out),
    )


def _note(blocks: int, running: Sequence[TrialCurve], left_out: Sequence[str]) -> str:
    parts = []
    if blocks:
        parts.append(f"Thin line: mean over {wording.counted(blocks, 'finished block')}.")
    if blocks > 1:
        parts.append("Band: from the smallest to the largest of these blocks.")
    if running:
        names = wording.listed(sorted({block_name(one.block_index) for one in running}))
        parts.append(f"Thick line: {names}, in the attempt that runs. Broken attempts are not drawn.")
    if left_out:
        parts.append(f"{wording.counted(len(left_out), 'more arm')} not drawn: {wording.listed(list(left_out))}.")
    return " ".join(parts)


def curves_of_arm(arm: str, finished: Sequence[TrialCurve], running: Sequence[TrialCurve]) -> ArmCurves | None:
    """Return what a picture shows of an arm, None for nothing."""
    done, now = ([one for one in curves if one.arm == arm] for curves in (finished, running))
    if not done and not now:
        return None
    common = sorted(set.intersection(*(set(one.curve) for one in done))) if done else []
    values = {step: [one.curve[step] for one in done] for step in common}
    last = (now or done)[-1]
    step, value = list(last.curve.items())[-1]
    return ArmCurves(
        arm=arm,
        low={step: min(of_blocks) for step, of_blocks in values.items()},
        mean={step: math.fsum(of_blocks) / len(done) for step, of_blocks in values.items()},
        high={step: max(of_blocks) for step, of_blocks in values.items()},
        running=tuple(one.curve for one in now),
        newest=f"{wording.number(value)} at step {step:,} of {block_name(last.block_index)}",
    )


def _draw(axes: "Axes", curves: ArmCurves, style: "ArmStyle") -> None:
    from ablate.experiments.reporting.pictures import drawing

    steps = drawing.thin(list(curves.mean), MOST_POINTS)
    low, mean, high = ([curve[step] for step in steps] for curve in (curves.low, curves.mean, curves.high))
    axes.fill_between(steps, low, high, color=style.colour, alpha=OPACITY, linewidth=0)
    axes.plot(steps, mean, color=style.colour, linestyle=style.line, linewidth=1.0)
    for curve in curves.running:
        points = drawing.thin(list(curve.items()), MOST_POINTS)
        axes.plot(*zip(*points, strict=True), color=style.colour, linestyle=style.line, linewidth=2.0)
