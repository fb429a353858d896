"""Which commit made the difference, from noisy measurements of some: a posterior over the commits.

Commits have places from 1 to `last`, in the order of history; 0 is the good one, `last` the bad one. One of them made
the whole step: commits before it measure 0, it and later ones measure the step. A measured difference has Student's t
distribution around that. Before any measurement every commit is equally likely.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import scipy
from numpy.typing import NDArray

ENOUGH = 0.95
"""Posterior probability at which a bisection ends."""
_OTHER_LEVEL = 0.01
"""Level, over all measured commits, at which one fits neither side of a single step."""
_CONTRADICTS = 0.001
"""Level, over all measured commits, at which one is on the other side of the culprit's step."""
_LEAST_NOISE = 1e-3
"""Standard error, as a share of the step, of measurements without noise."""


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A commit's measured difference from the good one, in one unit for all commits."""

    mean: float
    se: float
    df: float
    """Degrees of freedom of `se`."""


@dataclass(frozen=True, kw_only=True)
class OtherLevel:
    """A commit whose difference is neither 0 nor the whole step, so that several commits share the blame."""

    place: int
    share: float
    """Of the step."""


@dataclass(kw_only=True)
class Bisection:
    """The measurements so far, and what they say."""

    last: int
    """Place of the bad commit."""
    step: Shift
    """Of the bad commit; its mean is not 0."""
    measured: dict[int, list[Shift]] = field(default_factory=dict)
    """By place, of the commits between."""
    broken: set[int] = field(default_factory=set)
    """Places of commits that cannot be measured."""

    def posterior(self) -> NDArray[np.float64]:
        """Return the probability of each place from 1 to `last`, shape [last]."""
        places = np.arange(1, self.last + 1)
        log_likelihood = np.zeros(self.last)
        for place, differences in self.measured.items():
            for one in differences:
                before, after = self._log_likelihoods(one)
                log_likelihood += np.where(places <= place, after, before)
        weights = np.exp(log_likelihood - log_likelihood.max())
        return np.asarray(weights / weights.sum(), dtype=np.float64)

    def _log_likelihoods(self, one: Shift) -> tuple[float, float]:
        """Return those of a commit before the step, and of one after it."""
        own, beside = self._errors(one)
        before = float(scipy.stats.t.logpdf(one.mean / own, one.df)) - math.log(own)
        after = float(scipy.stats.t.logpdf((one.mean - self.step.mean) / beside, one.df)) - math.log(beside)
        return before, after

    def groups(self) -> list[tuple[range, float]]:
        """Return the places that no measurement can tell apart, each group with its probability."""
        posterior = self.posterior()
        testable = [place for place in range(1, self.last) if place not in self.broken]
        ends = [0, *testable, self.last]
        return [(range(low + 1, high + 1), float(posterior[low:high].sum())) for low, high in pairwise(ends)]

    def culprits(self) -> tuple[range, float] | None:
        """Return the places among which the culprit is, once that is probable enough; one place, if all can run."""
        places, probability = max(self.groups(), key=lambda group: group[1])
        return (places, probability) if probability >= ENOUGH else None

    def next_places(self, count: int) -> tuple[int, ...]:
        """Return up to `count` places to measure, in order: those that divide the probability most evenly."""
        groups = self.groups()
        below = np.cumsum([probability for _places, probability in groups])[:-1]
        chosen: set[int] = set()
        for number in range(1, count + 1):
            order = np.argsort(np.abs(below - number / (count + 1)), kind="stable")
            free = (int(index) for index in order if groups[index][0][-1] not in chosen)
            if (index := next(free, None)) is not None and 0 < below[index] < 1:
                chosen.add(groups[index][0][-1])
        return tuple(sorted(chosen))

    def other_level(self) -> OtherLevel | None:
        """Return the commit that fits neither side of a single step best, if it is proved."""
        means = {place: pooled(differences) for place, differences in self.measured.items()}
        p_values = {place: self._neither(one) for place, one in means.items()}
        place = min(p_values, key=lambda one: p_values[one], default=None)
        if place is None or p_values[place] * len(p_values) > _OTHER_LEVEL:
            return None
        return OtherLevel(place=place, share=means[place].mean / self.step.mean)

    def contradicting(self) -> tuple[int, ...]:
        """Return the commits before the culprit that measure its step, and those after it that do not, if proved.

        One step explains none of them: the difference came and went, as by a revert.
        """
        named = self.culprits()
        if named is None:
            return ()
        p_values = {}
        for place, differences in self.measured.items():
            one = pooled(differences)
            own, beside = self._errors(one)
            is_after = place >= named[0][-1]
            distance = abs(one.mean - self.step.mean) / beside if is_after else abs(one.mean) / own
            exact_df = self.step.df if self.step.se else math.inf
            p_values[place] = _p_value(distance, one.df if one.se else exact_df)
        return tuple(sorted(place for place, p in p_values.items() if p * len(p_values) <= _CONTRADICTS))

    def _neither(self, one: Shift) -> float:
        """Return the larger p value of two t tests: that it is 0, and that it is the step."""
        own, beside = self._errors(one)
        distances = abs(one.mean) / own, abs(one.mean - self.step.mean) / beside
        return max(_p_value(distance, one.df) for distance in distances)

    def _errors(self, one: Shift) -> tuple[float, float]:
        """Return the standard errors of a difference from 0, and from the step."""
        own = max(one.se, _LEAST_NOISE * abs(self.step.mean))
        return own, math.hypot(own, self.step.se)


def _p_value(distance: float, df: float) -> float:
    """Return the two-sided p value of a distance in standard errors."""
    return 2 * float(scipy.stats.t.sf(distance, df))


def pooled(differences: Sequence[Shift]) -> Shift:
    """Return the mean of several measurements of one commit, weighted by their precision."""
    if len(differences) == 1 or any(one.se == 0 for one in differences):
        return differences[0]
    weights = [one.se**-2 for one in differences]
    mean = math.fsum(weight * one.mean for weight, one in zip(weights, differences, strict=True)) / math.fsum(weights)
    return Shift(mean=mean, se=math.fsum(weights) ** -0.5, df=math.fsum(one.df for one in differences))
