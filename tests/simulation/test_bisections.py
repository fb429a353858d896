"""A bisection names the right commits at its level, over drawn histories."""

import math

import numpy as np
import pytest

from ablate.service.cli.commits.bisection import ENOUGH, Bisection, Shift
from tests.simulation.bisections import Histories, bisections, plain
from tests.simulation.test_cases import is_at_least, is_at_most


@pytest.mark.parametrize("commits", [2, 7, 64, 512])
@pytest.mark.parametrize("noise", [0.1, 0.35, 0.7])
def test_the_culprit_is_among_the_named_commits(commits: int, noise: float) -> None:
    outcomes = bisections(Histories(commits=commits, noise=noise, broken=0.1), 60)
    assert is_at_least(outcomes.right, ENOUGH)
    assert is_at_least(outcomes.named, 0.95)


def test_drift_between_rounds_misleads_plain_bisection_only() -> None:
    histories = Histories(commits=64, noise=0.2, drift=0.4)
    assert is_at_least(bisections(histories, 100).right, ENOUGH)
    assert is_at_most(plain(histories, 6, 400)[0], 0.7)


def test_two_commits_that_share_the_blame_are_seldom_taken_for_one() -> None:
    outcomes = bisections(Histories(commits=64, noise=0.1, share=0.5), 100)
    assert is_at_least(outcomes.shared, 0.8)


@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.35, 0.7])
@pytest.mark.parametrize("commits", [2, 8, 64])
def test_nothing_contradicts_one_step_where_there_is_one(commits: int, noise: float, drift: float) -> None:
    """None in 1,200 histories."""
    assert bisections(Histories(commits=commits, noise=noise, drift=drift, broken=0.1), 50).contradicted.hits == 0


@pytest.mark.parametrize("reverts", [1, 2])
@pytest.mark.parametrize(("noise", "least"), [(0.02, 0.99), (0.05, 0.9), (0.1, 0.5)])
def test_reverts_that_were_measured_contradict_one_step(noise: float, least: float, reverts: int) -> None:
    outcomes = bisections(Histories(commits=8, noise=noise, reverts=reverts), 100)
    assert is_at_least(outcomes.right, ENOUGH)
    assert outcomes.visible.hits > 40, "the search need not measure a revert"
    assert least * outcomes.visible.hits <= outcomes.contradicted.hits <= outcomes.visible.hits


@pytest.mark.parametrize("step_se", [0.0, 0.04])
def test_an_exact_revert_contradicts_one_step(step_se: float) -> None:
    """As a commit with the files of the good one."""
    step, measured = Shift(mean=5.0, se=step_se, df=4), Shift(mean=5.0, se=step_se, df=4)
    levels = {1: [Shift(mean=0.0, se=0.0, df=1)], 2: [measured] * 2, 3: [Shift(mean=0.0, se=0.0, df=1)]}
    bisection = Bisection(last=4, step=step, measured=levels)
    bisection.measured[2] *= 2
    assert bisection.culprits() is not None
    assert bisection.contradicting() == ((3,) if bisection.culprits()[0] == range(2, 3) else (2,))
    assert Bisection(last=4, step=step, measured={1: levels[1], 2: levels[2]}).contradicting() == ()


@pytest.mark.parametrize("seed", range(20))
def test_the_posterior_is_what_all_hypotheses_give_one_by_one(seed: int) -> None:
    """Against density ratios without logarithms, hypothesis by hypothesis."""
    chance = np.random.default_rng(seed)
    last = int(chance.integers(1, 9))
    step = Shift(mean=float(chance.choice([-3.0, 0.5, 20.0])), se=0.1, df=4)
    measured = {
        int(place): [
            Shift(mean=float(chance.normal(0, 1)), se=float(chance.uniform(0.2, 2)), df=int(chance.integers(1, 9)))
            for _ in range(int(chance.integers(1, 3)))
        ]
        for place in chance.permutation(np.arange(1, last))[:3]
    }
    weights = []
    for culprit in range(1, last + 1):
        weight = 1.0
        for place, differences in measured.items():
            for one in differences:
                error = math.sqrt(one.se**2 + step.se**2) if culprit <= place else one.se
                expected = step.mean if culprit <= place else 0.0
                weight *= (1 + ((one.mean - expected) / error) ** 2 / one.df) ** (-(one.df + 1) / 2) / error
        weights.append(weight)
    got = Bisection(last=last, step=step, measured=measured).posterior()
    assert got == pytest.approx(np.array(weights) / sum(weights), rel=1e-9)


def test_a_single_commit_needs_no_measurement_and_broken_neighbours_stay_together() -> None:
    step = Shift(mean=1.0, se=0.1, df=4)
    assert Bisection(last=1, step=step).culprits() == (range(1, 2), 1.0)
    unable = Bisection(last=5, step=step, broken={1, 2, 3, 4})
    assert unable.culprits() == (range(1, 6), pytest.approx(1.0))
    assert unable.next_places(3) == ()


@pytest.mark.parametrize(("count", "places"), [(1, (4,)), (3, (2, 4, 6)), (15, (1, 2, 3, 4, 5, 6, 7))])
def test_the_next_commits_divide_the_probability_evenly(count: int, places: tuple[int, ...]) -> None:
    assert Bisection(last=8, step=Shift(mean=1.0, se=0.1, df=4)).next_places(count) == places
