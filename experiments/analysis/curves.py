"""Numbers read from validation curves: the loss at a time, and the tokens or seconds to a target loss.

Curves are linear between validations. The error of that follows from second differences of the curve around the
segment, or in its first segment, which has no point before it, from the segment's ends.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ablate.experiments.analysis.evidence import Evidence, Pair
from ablate.experiments.analysis.statistics import mean_of
from ablate.experiments.design.metrics import CURVE_METRICS, METRICS
from ablate.experiments.design.spec_values import Difference
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipts import CurvePoint, Receipt

LOSS_AT_TIME = "loss_val_at_time"

Curve: TypeAlias = Sequence[tuple[float, float]]
"""(tokens or seconds, loss) of each validation, in order."""


@dataclass(frozen=True)
class Reading:
    """A number between two validations."""

    value: float
    error: float
    """Estimated largest error of the interpolation: of a loss in nats, of tokens or seconds of their logarithm."""
    censored: int = 0
    """1: the true number is larger, because the run ended before it; -1: smaller, before the first validation."""


def curve_of(receipt: Receipt, read: Callable[[CurvePoint], float]) -> Curve:
    """Return the curve over what `read` returns; empty without validations by a schedule."""
    points = receipt.summary.curve if receipt.outcome is Outcome.MEASURED and receipt.summary else None
    return [(read(point), point.loss) for point in points or ()]


def axis_of(metric: str) -> Callable[[CurvePoint], float]:
    """Return what the curves of a metric run over."""
    return (lambda point: point.seconds) if METRICS[metric].clocked else (lambda point: float(point.tokens))


def loss_at(curve: Curve, place: float) -> Reading:
    """Return the loss at `place`, between the first and the last validation."""
    for index, ((low, before), (high, after)) in enumerate(pairwise(curve)):
        if low <= place <= high:
            loss = before + (after - before) * (place - low) / (high - low)
            return Reading(loss, _error(curve, index, place, loss))
    raise ValueError(f"{place:g} is outside of the curve, from {curve[0][0]:g} to {curve[-1][0]:g}")


def place_of(curve: Curve, target: float) -> Reading | None:
    """Return where the loss first is at most `target`; None if it never is, or if it is at the first validation."""
    for index, ((low, before), (high, after)) in enumerate(pairwise(curve)):
        if before <= target:
            return None
        if after <= target:
            place = min(high, low + (before - target) * (high - low) / (before - after))
            least, most = _crossings(curve, index, before - target)
            return Reading(place, max(math.log(most / place), math.log(place / least), 0.0))
    return None


def _place_or_end(curve: Curve, target: float) -> Reading:
    """Return where the loss first is at most `target`, or the end of the curve that lies nearest to it."""
    place = place_of(curve, target)
    if place is not None:
        return place
    early = curve[0][1] <= target
    return Reading(curve[0 if early else -1][0], 0.0, censored=-1 if early else 1)


def _crossings(curve: Curve, index: int, fall: float) -> tuple[float, float]:
    """Return the first and the last place where the curve can have fallen by `fall` since point `index`.

    Both are crossings of parabolas through the segment's ends, with the estimated curvature down and up.
    """
    (low, before), (high, after) = curve[index : index + 2]
    if index == 0:
        return low, high
    width, bend = high - low, _curvature_around(curve, index)
    slope, bent = (before - after) / width, bend * width
    down = 2 * fall / (slope + bent + math.sqrt(max(0.0, (slope + bent) ** 2 - 4 * bend * fall)))
    up = 2 * fall / (slope - bent + math.sqrt((slope - bent) ** 2 + 4 * bend * fall))
    return low + min(down, width), low + min(up, width)


def _error(curve: Curve, index: int, place: float, loss: float) -> float:
    """Return the estimated error of the segment from point `index` on."""
    (low, before), (high, after) = curve[index : index + 2]
    if place in (low, high):
        return 0.0
    if index == 0:
        return max(abs(before - loss), abs(after - loss))
    return _curvature_around(curve, index) * (place - low) * (high - place)


def _curvature_around(curve: Curve, index: int) -> float:
    """Return the largest curvature that the segment from point `index` on shows together with a neighbour."""
    return max(_curvature(curve[at : at + 3]) for at in (index - 1, index) if at + 3 <= len(curve))


def _curvature(points: Curve) -> float:
    """Return the size of the second divided difference of three points: half of the second derivative."""
    (first, a), (second, b), (third, c) = points
    return abs(((c - b) / (third - second) - (b - a) / (second - first)) / (third - first))


def readings(pair: Pair, metric: str, target: float | None) -> tuple[Reading, Reading] | None:
    """Return the numbers of the variant and of the baseline in one block; None if a curve does not have it.

    A run that never reaches its target has the number of its end, and is marked as censored.
    """
    own, base = (curve_of(receipt, axis_of(metric)) for receipt in (pair.variant, pair.baseline))
    if not own or not base:
        return None
    if metric == LOSS_AT_TIME:
        place = min(own[-1][0], base[-1][0])
        if place < max(own[0][0], base[0][0]):
            return None
        return loss_at(own, place), loss_at(base, place)
    return _place_or_end(own, target or 0.0), _place_or_end(base, target or 0.0)


def off_the_curves(evidence: Evidence, metric: str, target: Difference | None) -> str | None:
    """Say which curves do not have the number; None if all have it, if a trial has no curve, or for other metrics.

    A trial that never reaches the target is censored. Leaving it out would leave out the worst trials.
    """
    if metric not in CURVE_METRICS:
        return None
    curves = [
        tuple(curve_of(receipt, axis_of(metric)) for receipt in (pair.variant, pair.baseline))
        for pair in evidence.pairs
    ]
    if not curves or any(not curve for pair in curves for curve in pair):
        return None
    if metric == LOSS_AT_TIME:
        apart = sum(min(own[-1][0], base[-1][0]) < max(own[0][0], base[0][0]) for own, base in curves)
        return f"in {apart} blocks one trial ended before the first validation of the other" if apart else None
    goal = 0.0 if target is None else target.value
    early = sum(curve[0][1] <= goal for pair in curves for curve in pair)
    if early:
        where = f"{early} of {2 * len(curves)} trials are at or below {goal:g} nats at their first validation"
        return f"{where}; a lower target, or validations more often, would have a number"
    arms = [[pair[place] for pair in curves] for place in (0, 1)]
    reached = [sum(place_of(curve, goal) is not None for curve in own) for own in arms]
    if reached == [len(curves), len(curves)]:
        return None
    lowest = [min(loss for curve in own for _, loss in curve) for own in arms]
    names = [f"arm '{evidence.arm.name}'", "the baseline"]
    counts = [
        f"{name} reached {goal:g} nats with {count} of {len(curves)} seeds" + f" (lowest: {low:.5g})"
        for name, count, low in zip(names, reached, lowest, strict=True)
    ]
    return ", ".join(counts)


@dataclass(frozen=True, kw_only=True)
class BandPoint:
    """One validation of an arm over its seeds."""

    tokens: int
    seconds: float
    """Mean over the seeds."""
    mean: float
    low: float
    """The middle half of the seeds lies between `low` and `high`: quartiles, which with few seeds lie between them."""
    high: float


def band_of(receipts: Sequence[Receipt]) -> tuple[BandPoint, ...]:
    """Return the curve of an arm over its seeds; the blocks of one seed count as one. Empty without curves."""
    by_seed: dict[int, list[tuple[CurvePoint, ...]]] = {}
    for receipt in receipts:
        if receipt.outcome is Outcome.MEASURED and receipt.summary and receipt.summary.curve:
            by_seed.setdefault(receipt.seed, []).append(receipt.summary.curve)
    every = [curve for own in by_seed.values() for curve in own]
    length = min(map(len, every), default=0)
    return tuple(_band_point([[curve[place] for curve in own] for own in by_seed.values()]) for place in range(length))


def _band_point(by_seed: Sequence[Sequence[CurvePoint]]) -> BandPoint:
    losses = [mean_of([point.loss for point in own]) for own in by_seed]
    low, high = np.quantile(losses, [0.25, 0.75])
    return BandPoint(
        tokens=by_seed[0][0].tokens,
        seconds=mean_of([mean_of([point.seconds for point in own]) for own in by_seed]),
        mean=mean_of(losses),
        low=float(low),
        high=float(high),
    )
