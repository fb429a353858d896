"""Rates of simulated ablations with their Monte-Carlo intervals."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A rate as hits and tries."""

    hits: int
    tries: int

    @property
    def value(self) -> float:
        """The share."""
        return self.hits / self.tries

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of Clopper and Pearson."""
        low = float(special.betaincinv(self.hits, self.tries - self.hits + 1, 0.025)) if self.hits else 0.0
        rest = self.tries - self.hits
        return low, float(special.betaincinv(self.hits + 1, rest, 0.975)) if rest else 1.0

    def __str__(self) -> str:
        """Return percent with the interval, for example "3.8 % (3.2 to 4.4)"."""
        low, high = self.interval
        return f"{100 * self.value:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

    def __add__(self, other: "Rate") -> "Rate":
        """Join two sets of tries."""
        return Rate(hits=self.hits + other.hits, tries=self.tries + other.tries)


def rate(flags: Any) -> Rate:
    """Return the rate of true values in an array."""
    return Rate(hits=int(np.count_nonzero(flags)), tries=int(np.size(flags)))
