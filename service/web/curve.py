"""A curve of a running trial as plain SVG: no library draws it, and its colours come from the style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.reporting import wording

WIDTH, HEIGHT = 320, 90
_MARGIN = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One quantity over the steps of a trial."""

    label: str
    points: str
    """As `polyline` takes them, in a box of `WIDTH` by `HEIGHT`."""
    low: str
    high: str
    newest: str
    steps: tuple[int, int]
    """Of the first and the last point."""

    @property
    def described(self) -> str:
        """Say in words what is drawn."""
        first, last = self.steps
        return f"{self.label} over steps {first} to {last}: from {self.low} to {self.high}, now {self.newest}"


def draw(label: str, steps: Sequence[int], values: Sequence[float | None]) -> Curve | None:
    """Return the curve through the finite values; None with fewer than two of them."""
    found = [(x, y) for x, y in zip(steps, values, strict=True) if y is not None and math.isfinite(y)]
    if len(found) < 2:
        return None
    xs, ys = zip(*found, strict=True)
    points = " ".join(f"{_at(x, xs, WIDTH):.1f},{HEIGHT - _at(y, ys, HEIGHT):.1f}" for x, y in found)
    low, high, newest = (wording.number(y) for y in (min(ys), max(ys), ys[-1]))
    return Curve(label=label, points=points, low=low, high=high, newest=newest, steps=(xs[0], xs[-1]))


def _at(value: float, among: Sequence[float], size: int) -> float:
    """Return where a value stands between the least and the largest, in the middle where all are equal."""
    low, high = min(among), max(among)
    share = (value - low) / (high - low) if high > low else 0.5
    return _MARGIN + share * (size - 2 * _MARGIN)
