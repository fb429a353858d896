"""Losses of null variants: how often the envelope refuses a variant whose losses are the baseline's."""

import numpy as np

from experiments.analysis.requirements import envelopes
from tests.simulation.rates import Rate, rate


def refused(*, blocks: int, seeds: int, repetitions: int, heavy: bool = False) -> tuple[Rate, Rate]:
    """Return how often the envelope refuses, and how often the largest gap of baseline repeats would have.

    Losses of a seed are a value of its own and noise: normal, or Student's t with 3 degrees of freedom where `heavy`.
    """
    rng = np.random.default_rng([blocks, seeds])
    by_interval, by_gap = [], []
    for _ in range(repetitions):
        noise = rng.standard_t(3, (2, blocks)) if heavy else rng.normal(0, 1, (2, blocks))
        losses = noise + 10 * rng.normal(size=seeds)[np.arange(blocks) % seeds]
        repeats = {seed: losses[0, seed::seeds].tolist() for seed in range(seeds)}
        own = {seed: losses[1, seed::seeds] for seed in range(seeds)}
        limits = envelopes(repeats)
        by_interval.append(any(np.abs(own[s] - np.mean(repeats[s])).max() > limits[s] for s in own))
        by_gap.append(any(np.abs(own[s] - repeats[s]).max() > np.ptp(repeats[s]) for s in own))
    return rate(by_interval), rate(by_gap)
