"""The values of an exact metric, seed by seed, as a verdict holds them."""

import math

from pydantic import Field

from experiments.design.metrics import METRICS, Metric
from experiments.documents import Frozen


class ExactPair(Frozen):
    """The values of one seed. Each is what every repeat gave, in the metric's unit."""

    seed: int
    repeats: int
    """Blocks that ran with this seed, at least two."""
    baseline: float
    variant: float

    @property
    def change(self) -> float:
        """The variant's value minus the baseline's, in the metric's unit."""
        return self.variant - self.baseline

    @property
    def change_pct(self) -> float | None:
        """The change in percent of the baseline's value; None where that is 0 and the variant's is not."""
        if self.baseline:
            return 100 * self.change / abs(self.baseline)
        return None if self.change else 0.0


class ExactComparison(Frozen):
    """One exact metric of one variant beside the baseline, seed by seed."""

    metric: str
    blocks: int
    seeds: tuple[ExactPair, ...]
    """One for each seed whose repeats agree in both arms."""
    problems: tuple[str, ...] = ()
    """What shows that it is not exact here: repeats that differ."""
    unrepeated: tuple[int, ...] = Field(default=(), exclude_if=lambda seeds: not seeds)
    """Seeds that ran in one block only, whose values therefore prove nothing."""

    @property
    def gains_pct(self) -> tuple[float, ...]:
        """The change of every seed as improvement: positive is better; infinite where the baseline has 0."""
        return tuple(_gain_pct(METRICS[self.metric], pair) for pair in self.seeds)


def _gain_pct(metric: Metric, pair: ExactPair) -> float:
    change = math.copysign(math.inf, pair.change) if pair.change_pct is None else pair.change_pct
    return change if metric.better == "higher" else -change
