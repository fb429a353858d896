"""Curves of an ablation that runs: loss and throughput over the steps, all arms in one picture, a band over blocks."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection

from experiments.block_numbers import block_name
from experiments.reporting import wording
from service.store.ablations import results
from service.store.nodes import nodes

T = TypeVar("T")


class Frame(NamedTuple):
    """Size of a picture, and the room around its plot for numbers and labels."""

    width: int = 560
    height: int = 250
    left: int = 62
    right: int = 10
    top: int = 12
    bottom: int = 40


FRAME = Frame()
MOST_ARMS = 9
MOST_BLOCKS = 12
"""Finished blocks in a band, the newest; each of their receipts is read once."""
MOST_POINTS = 120
"""Steps of a curve that are drawn, evenly spread."""
COLOURS = 8
DASHES = ("none", "7 3", "3 2.5", "8 2.5 2 2.5")
_TICKS = 5

Curve = Mapping[int, float]
"""Step -> value."""


class TrialCurve(NamedTuple):
    """One quantity of one trial."""

    arm: str
    block_index: int
    curve: Curve


class Tick(NamedTuple):
    """One number at an axis."""

    place: float
    text: str


@dataclass(frozen=True, kw_only=True)
class ArmLines:
    """An arm in a picture."""

    arm: str
    colour: str
    """Of the page's theme."""
    dash: str
    band: str
    """In SVG's form for `polygon`; empty with fewer than two finished blocks."""
    mean: str
    """Mean over the finished blocks, in SVG's form for `polyline`; empty without one."""
    running: tuple[str, ...]
    """One line for each running trial; a lone point is left out."""
    newest: str
    """The newest value with its step and block."""


@dataclass(frozen=True, kw_only=True)
class LivePicture:
    """One quantity of all arms over the steps."""

    name: str
    label: str
    """With the unit."""
    arms: tuple[ArmLines, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    note: str
    frame: Frame = FRAME

    @property
    def described(self) -> str:
        """Describe the picture for screen readers."""
        lines = "; ".join(f"{one.arm}: {one.newest}" for one in self.arms)
        return f"{self.label} over the steps, all arms. Newest: {lines}."


class Quantity(NamedTuple):
    """What a picture shows."""

    name: str
    label: str
    in_heartbeat: str


QUANTITIES = (
    Quantity("loss", "training loss, nats", "loss"),
    Quantity("speed", "throughput, tokens/s", "tokens_per_s"),
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


_CACHE: dict[str, tuple[Curve, ...]] = {}
"""Digest of a receipt -> its curves, which never change."""
MOST_CACHED = 2000


def _curves_of(connection: Connection, trial_id: str, digest: str) -> tuple[Curve, ...]:
    curves = _CACHE.get(digest)
    if curves is None:
        curves = curves_of_steps(json.loads(results.read_payload(connection, trial_id))["steps"])
        if len(_CACHE) >= MOST_CACHED:
            _CACHE.clear()
        _CACHE[digest] = curves
    return curves


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
    finished = [one for one in finished if one.arm in arms and len(one.curve) > 1]
    running = [one for one in running if one.arm in arms and len(one.curve) > 1]
    if not finished and not running:
        return None
    every = [point for one in (*finished, *running) for point in one.curve.items()]
    scale = _Scale(x=_range([0, *(step for step, _ in every)]), y=_range([value for _, value in every]))
    lines = [_lines(arm, place, finished, running, scale) for place, arm in enumerate(arms)]
    blocks = len({one.block_index for one in finished})
    return LivePicture(
        name=quantity.name,
        label=quantity.label,
        arms=tuple(one for one in lines if one is not None),
        x_ticks=tuple(Tick(scale.at_x(x), f"{x:,.0f}") for x in ticks(*scale.x) if x == int(x)),
        y_ticks=tuple(Tick(scale.at_y(y), wording.with_minus(f"{y:,.10g}")) for y in ticks(*scale.y)),
        note=_note(blocks, running, left_out),
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


class _Scale(NamedTuple):
    x: tuple[float, float]
    y: tuple[float, float]

    def at_x(self, step: float) -> float:
        low, high = self.x
        return round(FRAME.left + (step - low) / (high - low) * (FRAME.width - FRAME.left - FRAME.right), 1)

    def at_y(self, value: float) -> float:
        low, high = self.y
        return round(
            FRAME.height - FRAME.bottom - (value - low) / (high - low) * (FRAME.height - FRAME.top - FRAME.bottom), 1
        )

    def points(self, curve: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.at_x(x)},{self.at_y(y)}" for x, y in curve)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, apart from each other."""
    low, high = min(values), max(values)
    room = 0.5 * abs(low) or 0.5
    return (low, high) if high - low > 1e-9 * max(abs(low), abs(high)) else (low - room, high + room)


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two values, at least two."""
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _lines(
    arm: str, place: int, finished: Sequence[TrialCurve], running: Sequence[TrialCurve], scale: _Scale
) -> ArmLines | None:
    done, now = ([one for one in curves if one.arm == arm] for curves in (finished, running))
    if not done and not now:
        return None
    by_step: dict[int, list[float]] = {}
    for one in done:
        for step, value in one.curve.items():
            by_step.setdefault(step, []).append(value)
    steps = _thin([step for step in sorted(by_step) if len(by_step[step]) == len(done)])
    tops, bottoms = ([(step, pick(by_step[step])) for step in steps] for pick in (max, min))
    last = (now or done)[-1]
    step, value = list(last.curve.items())[-1]
    return ArmLines(
        arm=arm,
        colour=f"--arm-{0 if place == 0 else (place - 1) % (COLOURS - 1) + 1}",
        dash=DASHES[place % len(DASHES)],
        band=scale.points([*tops, *reversed(bottoms)]) if len(done) > 1 else "",
        mean=scale.points((step, math.fsum(by_step[step]) / len(done)) for step in steps),
        running=tuple(scale.points(_thin(list(one.curve.items()))) for one in now),
        newest=f"{wording.number(value)} at step {step:,} of {block_name(last.block_index)}",
    )


def _thin(items: list[T]) -> list[T]:
    """Return at most `MOST_POINTS` items, evenly spread, including the last."""
    stride = max(1, math.ceil(len(items) / MOST_POINTS))
    return items[::-1][::stride][::-1]
