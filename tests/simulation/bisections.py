"""Bisections of drawn histories, by the posterior over paired blocks, and as plain bisection with repeats does it.

Plain bisection measures one commit after another, each so many times, and compares its mean with the middle of the
good and the bad commit, which it measured at the start.
"""

from dataclasses import dataclass
from typing import Any

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
    reverts: int = 0
    """Commits that take the whole step back, each before another one that makes it."""


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
    contradicted: Rate
    """Those that named commits and said that one step does not explain others."""
    visible: Rate
    """Those that named commits after they had measured one before the step above it, or one after the step below it."""


def bisections(histories: Histories, repetitions: int, seed: int = 1) -> Outcomes:
    """Bisect drawn histories by the posterior."""
    chance = np.random.default_rng(seed)
    ends = [_bisected(histories, chance) for _ in range(repetitions)]
    named = [end for end in ends if end.is_right is not None]
    return Outcomes(
        right=rate(np.array([end.is_right for end in named] or [False])),
        named=rate(np.array([end.is_right is not None for end in ends])),
        trials=float(np.mean([end.trials for end in ends])),
        shared=rate(np.array([end.shared for end in ends])),
        contradicted=rate(np.array([end.contradicted for end in named] or [False])),
        visible=rate(np.array([end.visible for end in named] or [False])),
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


@dataclass(frozen=True, kw_only=True)
class _End:
    """How one bisection ended."""

    is_right: bool | None
    """Whether a culprit is among the named commits; None if none are named."""
    trials: int
    shared: bool = False
    contradicted: bool = False
    visible: bool = False


def _levels(histories: Histories, chance: np.random.Generator) -> tuple[set[int], "np.ndarray[Any, Any]"]:
    """Draw a history; return the culprits, and the level of every commit from the good one on."""
    last = histories.commits
    places = np.arange(last + 1)
    if histories.reverts:
        changes = np.sort(chance.choice(places[1:], 1 + 2 * histories.reverts, replace=False))
        return set(map(int, changes[::2])), np.searchsorted(changes, places, side="right") % 2.0
    culprit = int(chance.integers(1, last + 1))
    earlier = int(chance.integers(1, culprit)) if culprit > 1 and histories.share < 1 else culprit
    return {culprit}, (1 - histories.share) * (places >= earlier) + histories.share * (places >= culprit)


def _bisected(histories: Histories, chance: np.random.Generator) -> _End:
    """Bisect one history."""
    last = histories.commits
    culprits, levels = _levels(histories, chance)
    places = np.arange(last + 1)
    broken = {int(place) for place in places[1:-1] if chance.random() < histories.broken}
    [step] = _measured(histories, chance, [1.0])
    bisection, trials = Bisection(last=last, step=step, broken=broken), 2 * BLOCKS
    for _ in range(_MOST_ROUNDS):
        if bisection.other_level() is not None:
            return _End(is_right=None, trials=trials, shared=True)
        if (named := bisection.culprits()) is not None:
            return _End(
                is_right=not culprits.isdisjoint(named[0]),
                trials=trials,
                contradicted=bool(bisection.contradicting()),
                visible=any((place >= named[0][-1]) != levels[place] for place in bisection.measured),
            )
        chosen = bisection.next_places(AT_ONCE)
        for place, one in zip(chosen, _measured(histories, chance, levels[list(chosen)]), strict=True):
            bisection.measured.setdefault(place, []).append(one)
        trials += BLOCKS * (len(chosen) + 1)
    return _End(is_right=None, trials=trials)


def _measured(
    histories: Histories,
    chance: np.random.Generator,
    levels: "np.ndarray[tuple[int], np.dtype[np.float64]] | list[float]",
) -> list[Shift]:
    """Measure commits in blocks beside the good one; drift moves all arms of a round alike."""
    baseline = chance.normal(0, histories.noise, BLOCKS)
    differences = [level + chance.normal(0, histories.noise, BLOCKS) - baseline for level in levels]
    return [Shift(mean=float(d.mean()), se=float(d.std(ddof=1) / BLOCKS**0.5), df=BLOCKS - 2) for d in differences]
