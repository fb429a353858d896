"""Changes that do nothing, screened on the seeds of their own test: what public seeds cost, and drawn ones do not."""

import numpy as np
import pytest
import scipy

from ablate.experiments.design.power import alpha_of, session_level

SEEDS, CANDIDATES, REPETITIONS = 12, 300, 400


def t_of(differences: np.ndarray) -> np.ndarray:
    """Return the t statistic of each row of differences, one per seed."""
    return differences.mean(-1) / (differences.std(-1, ddof=1) / np.sqrt(differences.shape[-1]))


@pytest.mark.parametrize("level", [session_level(1, ()), alpha_of(1)], ids=["a first proposal", "a first asking"])
def test_the_best_of_many_null_changes_passes_on_public_seeds_and_not_on_drawn_ones(level: float) -> None:
    rng = np.random.default_rng(20261129)
    limit = scipy.stats.t.ppf(level / 2, SEEDS - 1)
    screened = np.array([t_of(rng.normal(size=(CANDIDATES, SEEDS))).min() for _ in range(REPETITIONS)])
    drawn = t_of(rng.normal(size=(REPETITIONS, SEEDS)))
    assert np.mean(screened < limit) > 0.8
    assert scipy.stats.binomtest(int((drawn < limit).sum()), REPETITIONS, level / 2, "greater").pvalue > 0.01
