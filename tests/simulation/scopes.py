"""What a verdict does not speak of: other nodes than those that ran, and other luck than that of independent seeds."""

from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from ablate.experiments.analysis.statistics import Array, fit, log_ratio
from ablate.experiments.design.power import alpha_of
from tests.simulation.cases import MARGIN_PCT, NO_MARGIN_PCT, noisy, windows_in_parts
from tests.simulation.rates import Rate, rate
from tests.simulation.words import Flags, Windows, words_of

PLANTED_PCT = 2.0


@dataclass(frozen=True, kw_only=True)
class NodeRates:
    """Rates of one variant whose effect differs between the nodes that run blocks by turns."""

    of_all: Rate
    """Better or worse, although the mean over all nodes that might have run is zero."""
    of_these: Rate
    """Better or worse, although the mean over those that did run is zero."""
    detected: Rate
    """A mean of `PLANTED_PCT` over all nodes is better beyond the margin."""
    of_all_by_nodes: Rate
    """Wrong for all nodes if nodes are the sample: Student's t over their means."""
    detected_by_nodes: Rate
    """A mean of `PLANTED_PCT` over all nodes is beyond the margin by the same test."""


def over_nodes(nodes: int, *, apart_pct: float, blocks: int, repetitions: int) -> NodeRates:
    """Count verdicts on a variant whose effect on each node has a standard deviation of `apart_pct` over nodes."""
    rng = np.random.default_rng([nodes, blocks, round(1000 * apart_pct)])
    turns = np.arange(blocks) % nodes
    parts = []
    for windows in windows_in_parts(noisy("normal"), blocks, 1, repetitions, 0):
        own = rng.normal(0, log_ratio(apart_pct), (len(windows.d), nodes))[:, turns]
        parts.append(_words_over_nodes(windows, own, turns))
    return NodeRates(**{name: rate(np.concatenate([part[name] for part in parts])) for name in parts[0]})


def _words_over_nodes(windows: Windows, own: Array, turns: Array) -> dict[str, Flags]:
    alpha, gain, margin = alpha_of(1), log_ratio(PLANTED_PCT), log_ratio(MARGIN_PCT)
    apart, here = (_with(windows, effects) for effects in (own, own - own.mean(axis=1, keepdims=True)))
    wrong, local = (
        words_of(one, alpha=alpha, margin_pct=NO_MARGIN_PCT, effects=np.zeros(1)).changed for one in (apart, here)
    )
    good = words_of(apart, alpha=alpha, margin_pct=MARGIN_PCT, effects=np.full(1, gain)).better
    means = np.stack([apart.d[:, 0, turns == node].mean(axis=1) for node in range(turns.max() + 1)], axis=1)
    nodes = means.shape[1]
    reach = special.stdtrit(nodes - 1, 1 - alpha / 2) * means.std(axis=1, ddof=1) / np.sqrt(nodes)
    return {
        "of_all": wrong[:, 0],
        "of_these": local[:, 0],
        "detected": good[:, 0],
        "of_all_by_nodes": np.abs(means.mean(axis=1)) > reach,
        "detected_by_nodes": means.mean(axis=1) + gain - reach > margin,
    }


def _with(windows: Windows, effects: Array) -> Windows:
    """Return windows whose blocks have these effects on all steps, (repetitions, blocks)."""
    more = effects[:, None, :]
    return replace(windows, d=windows.d + more, sums=windows.sums + more, by_median=windows.by_median + more)


def wrong_of_alike_seeds(shared: float, *, seeds: int, repetitions: int) -> Rate:
    """Return how often two equal arms differ if a `shared` part of the variance is the same for two seeds each."""
    rng = np.random.default_rng([seeds, round(100 * shared)])
    both = np.repeat(rng.normal(size=(repetitions, seeds // 2)), 2, axis=1)
    d = shared**0.5 * both + (1 - shared) ** 0.5 * rng.normal(size=(repetitions, seeds))
    return rate(fit(d, np.zeros(seeds)).p_different() <= alpha_of(1))
