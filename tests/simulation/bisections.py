"""Bisections of drawn histories, by the posterior over paired blocks, and as plain bisection with repeats does it.

Plain bisection measures one commit after another, each so many times, and compares its mean with the middle of the
good and the bad commit, which it measured at the start.
"""

from dataclasses import dataclass

import numpy as np

from ablate.service.cli.commits.bisection import Bisection, Shift
from tests.simulation.rates import Rate, rate

BLOCKS = 6
AT_ONCE = 3
_MOST_ROUNDS = 40


@dataclass(frozen=True, kw_only=True)
class Histories:
    """Histories with one step of size 1."""

    commits: int
    noise: float
    """Standard deviation of a trial."""
    drift: float = 0.0
    """Standard deviation of the machine's level, which stays for a round, or for a commit of plain bisection."""
    broken: float = 0.0
    """Share of the commits that cannot run."""
    share: float = 1.0
    """Of the step that the culprit made; an earlier commit made the rest."""


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """How bisections ended."""

    right: Rate
    """Those that named commits with the culprit among them, of those that named any."""
    named: Rate
    trials: float
    """Mean number of trials."""
    shared: Rate
    """Those that ended with several commits sharing the blame."""


def bisections(histories: Histories, repetitions: int, seed: int = 1) -> Outcomes:
    """Bisect drawn histories by the posterior."""
    chance = np.random.default_rng(seed)
    ends = [_bisected(histories, chance) for _ in range(repetitions)]
    right = [is_right for is_right, _trials, _shared in ends if is_right is not None]
    return Outcomes(
        right=rate(np.array(right or [False])),
        named=rate(np.array([is_right is not None for is_right, _trials, _shared in ends])),
        trials=float(np.mean([trials for _right, trials, _shared in ends])),
        shared=rate(np.array([shared for _right, _trials, shared in ends])),
    )


def plain(histories: Histories, repeats: int, repetitions: int, seed: int = 1) -> tuple[Rate, float]:
    """Return how often plain bisection names the culprit, and its trials. Every commit runs."""
    chance = np.random.default_rng(seed)
    right, trials = [], []
    for _ in range(repetitions):
        culprit = int(chance.integers(1, histories.commits + 1))

        def mean(level: float) -> float:
            noise = chance.normal(0, histories.noise, repeats).mean()
            return level + float(noise) + float(chance.normal(0, histories.drift))

        good, bad = mean(0.0), mean(1.0)
        low, high, steps = 0, histories.commits, 2
        while high - low > 1:
            middle, steps = (low + high) // 2, steps + 1
            if mean(float(middle >= culprit)) > (good + bad) / 2:
                high = middle
            else:
                low = middle
        right.append(high == culprit)
        trials.append(steps * repeats)
    return rate(np.array(right)), float(np.mean(trials))


def _bisected(histories: Histories, chance: np.random.Generator) -> tuple[bool | None, int, bool]:
    """Bisect one history; return whether the culprit is named, the trials, and whether several share the blame."""
    last = histories.commits
    culprit = int(chance.integers(1, last + 1))
    earlier = int(chance.integers(1, culprit)) if culprit > 1 and histories.share < 1 else culprit
    places = np.arange(last + 1)
    levels = (1 - histories.share) * (places >= earlier) + histories.share * (places >= culprit)
    broken = {int(place) for place in places[1:-1] if chance.random() < histories.broken}
    [step] = _measured(histories, chance, [1.0])
    bisection, trials = Bisection(last=last, step=step, broken=broken), 2 * BLOCKS
    for _ in range(_MOST_ROUNDS):
        if bisection.other_level() is not None:
            return None, trials, True
        if (named := bisection.culprits()) is not None:
            return culprit in named[0], trials, False
        chosen = bisection.next_places(AT_ONCE)
        for place, one in zip(chosen, _measured(histories, chance, levels[list(chosen)]), strict=True):
            bisection.measured.setdefault(place, []).append(one)
        trials += BLOCKS * (len(chosen) + 1)
    return None, trials, False


def _measured(
    histories: Histories,
    chance: np.random.Generator,
    levels: "np.ndarray[tuple[int], np.dtype[np.float64]] | list[float]",
) -> list[Shift]:
    """Measure commits in blocks beside the good one; drift moves all arms of a round alike."""
    baseline = chance.normal(0, histories.noise, BLOCKS)
    differences = [level + chance.normal(0, histories.noise, BLOCKS) - baseline for level in levels]
    return [Shift(mean=float(d.mean()), se=float(d.std(ddof=1) / BLOCKS**0.5), df=BLOCKS - 2) for d in differences]
