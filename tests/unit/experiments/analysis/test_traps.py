"""Seeded simulations: on data that fools a naive analysis, ours errs at or under the nominal 5 %.

Each test first shows that the trap is one (the naive error), then that the pipeline's own functions (running order,
summary of a trial, comparison, word) do not fall into it.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from experiments.analysis.comparing import Levels, Sample, compare
from experiments.analysis.judge import judge
from experiments.analysis.statistics import fit
from experiments.analysis.words import word_of
from experiments.design.plan import orders
from experiments.design.power import alpha_of, blocks_to_detect
from experiments.design.spec import Primary
from experiments.outcomes import VerdictWord
from experiments.records.circumstances import CALIBRATED
from experiments.records.receipts import Step, summarise
from tests.factories import make_plan, make_receipts, make_spec

Array = NDArray[np.float64]

NO_MARGIN = Primary.model_validate({"margin": "0.0001%"})
"""So small that only the statistics decide."""
CHANGED = {VerdictWord.BETTER, VerdictWord.WORSE}


def error_limit(trials: int, nominal: float = 0.05) -> float:
    """Return the error rate that a correct procedure exceeds once in a thousand simulations of this size."""
    return float(stats.binom.ppf(0.999, trials, nominal)) / trials


def places_of(blocks: int, seed: int = 0) -> tuple[int, ...]:
    """Return the places of b minus those of a, in our own order."""
    return tuple(order.index("b") - order.index("a") for order in orders(["a", "b"], blocks=blocks, seed=seed))


def words(differences: Mapping[str, Sequence[float]], primary: Primary = NO_MARGIN, seed: int = 0) -> list[VerdictWord]:
    samples = {arm: Sample(differences=tuple(d), places=places_of(len(d), seed)) for arm, d in differences.items()}
    levels = Levels(family=len(samples), alphas=dict.fromkeys(samples, alpha_of(1)), margin_pct=primary.margin)
    return [word_of(found, primary) for found in compare("tokens_per_s", samples, levels).values()]


def false_positives(draw: Callable[[np.random.Generator], Array], trials: int) -> float:
    rng = np.random.default_rng(20261120)
    return sum(words({"v": list(draw(rng))})[0] in CHANGED for _ in range(trials)) / trials


def in_order(penalty_or_drift: Callable[[int, int], float], seed: int, blocks: int, sd: float) -> Array:
    """Return block differences of an A/A comparison run in our own order, under an effect of place."""
    rng = np.random.default_rng(seed)
    found = []
    for index, order in enumerate(orders(["a", "b"], blocks=blocks, seed=seed)):
        value = {arm: penalty_or_drift(index, slot) + rng.normal(0, sd) for slot, arm in enumerate(order)}
        found.append(value["b"] - value["a"])
    return np.array(found)


def test_steps_are_not_samples() -> None:
    rng = np.random.default_rng(1)
    naive = ours = 0
    trials, blocks = 60, 6
    for _ in range(trials):
        speed = np.exp(rng.normal(0, 0.004, (2, blocks)))
        seconds = 0.1 / speed[..., None] * np.exp(rng.normal(0, 0.01, (2, blocks, 50)))
        naive += stats.ttest_ind(seconds[0, 0], seconds[1, 0], equal_var=False).pvalue < 0.05
        rates = np.array([[process_rate(process) for process in arm] for arm in seconds])
        ours += words({"v": list(np.log(rates[1] / rates[0]))})[0] in CHANGED
    assert naive / trials > 0.3
    assert ours / trials <= error_limit(trials)


def process_rate(seconds: Array) -> float:
    """Return tokens/s of one process by the declared estimator."""
    timed = [
        Step(index=i + 1, phase="timed", seconds=s, ended_s=0, tokens=100, loss=1, grad_norm=1)
        for i, s in enumerate(seconds)
    ]
    first = Step(index=0, phase="compile", seconds=1, ended_s=0, tokens=100, loss=1, grad_norm=1)
    return summarise([first, *timed], flops_per_step=1, loss_val=None, peak_flops=None).tokens_per_s


def test_one_arm_after_the_other_under_drift() -> None:
    trials, blocks, sd = 400, 8, 0.004
    rng = np.random.default_rng(2)
    drift = np.linspace(0, 0.01, 2 * blocks)
    runs = drift + rng.normal(0, sd, (trials, 2 * blocks))
    naive = stats.ttest_ind(runs[:, :blocks], runs[:, blocks:], axis=1).pvalue < 0.05
    place = 0.01 / (2 * blocks)
    ours = [in_order(lambda b, s: (2 * b + s) * place, seed, blocks, sd) for seed in range(trials)]
    assert naive.mean() > 0.3
    assert np.mean([words({"v": list(d)}, seed=i)[0] in CHANGED for i, d in enumerate(ours)]) <= error_limit(trials)


def test_fixed_alternation_with_a_first_slot_penalty() -> None:
    trials, blocks, sd, penalty = 400, 10, 0.004, 0.005
    rng = np.random.default_rng(3)
    naive = stats.ttest_1samp(penalty + rng.normal(0, sd * math.sqrt(2), (trials, blocks)), 0, axis=1).pvalue < 0.05
    ours = [in_order(lambda _, slot: -penalty * (slot == 0), seed, blocks, sd) for seed in range(trials)]
    assert naive.mean() > 0.4
    assert np.mean([words({"v": list(d)}, seed=i)[0] in CHANGED for i, d in enumerate(ours)]) <= error_limit(trials)


def test_stopping_at_the_first_significant_look() -> None:
    trials, blocks = 600, 20
    d = np.random.default_rng(4).normal(0, 0.005, (trials, blocks))
    looks = [stats.ttest_1samp(d[:, :n], 0, axis=1).pvalue < 0.05 for n in range(4, blocks + 1)]
    assert np.any(looks, axis=0).mean() > 0.15
    sample = d[:150]
    ours = np.mean([words({"v": list(row)})[0] in CHANGED for row in sample])
    assert ours <= error_limit(len(sample))


def test_stopping_early_earns_no_word() -> None:
    spec = make_spec(design__blocks={"count": 8})
    plan = make_plan(spec)
    early = [r for r in make_receipts(plan, {"psiv-on": 1.2}, sd=0.001) if r.ids.block_index < 7]
    assert {variant.measured for variant in judge(plan, spec, early, CALIBRATED).variants} == {VerdictWord.INCONCLUSIVE}


def test_twelve_null_variants() -> None:
    trials, blocks, sd = 250, 8, 0.005
    rng = np.random.default_rng(5)
    naive = ours = 0
    for _ in range(trials):
        baseline = rng.normal(0, sd, blocks)
        d = {f"v{i}": list(rng.normal(0, sd, blocks) - baseline) for i in range(12)}
        naive += any(float(fit(values, places_of(blocks)).p_different()) < 0.05 for values in d.values())
        ours += any(word in CHANGED for word in words(d))
    assert naive / trials > 0.25
    assert ours / trials <= error_limit(trials)


def test_interval_of_six_blocks_covers() -> None:
    trials = 1500
    d = np.random.default_rng(6).normal(0.01, 0.005, (trials, 6))
    means = d[:, np.random.default_rng(0).integers(0, 6, (400, 6))].mean(axis=2)
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    assert np.mean((low <= 0.01) & (high >= 0.01)) < 0.89
    low_, high_ = fit(d, places_of(6)).interval(0.05)
    assert np.mean((low_ <= 0.01) & (high_ >= 0.01)) >= 1 - error_limit(trials)


def test_interval_of_twenty_skewed_blocks_covers() -> None:
    trials = 250
    d = np.random.default_rng(7).gamma(4.0, 0.0025, (trials, 20))
    low, high = fit(d, places_of(20)).interval(0.05)
    assert np.mean((low <= 0.01) & (high >= 0.01)) >= 1 - error_limit(trials, nominal=0.06)


def test_nothing_is_called_a_change_at_the_nominal_rate() -> None:
    for blocks in (6, 10):
        assert false_positives(lambda rng, n=blocks: rng.normal(0, 0.007, n), 1000) <= error_limit(1000)  # type: ignore[misc]


def test_planted_one_percent_is_found_with_the_planned_power() -> None:
    trials = 600
    margin = Primary.model_validate({"margin": "0.2%"})
    for sd in (0.005, 0.01):
        blocks = blocks_to_detect(0.01, sd, minimum=6)
        assert blocks is not None
        d = np.random.default_rng(8).normal(0.01, sd, (trials, blocks))
        found = np.mean([words({"v": list(row)}, margin)[0] is VerdictWord.BETTER for row in d])
        assert found >= 0.8 - 3.1 * math.sqrt(0.8 * 0.2 / trials)


def test_sameness_is_proved_and_not_inferred_from_silence() -> None:
    margin = Primary.model_validate({"margin": "0.5%"})
    rng = np.random.default_rng(9)
    quiet = [words({"v": list(rng.normal(0, 0.005, 20))}, margin)[0] for _ in range(100)]
    noisy = [words({"v": list(rng.normal(0, 0.03, 6))}, margin)[0] for _ in range(300)]
    at_margin = [words({"v": list(rng.normal(0.005, 0.005, 12))}, margin)[0] for _ in range(300)]
    assert quiet.count(VerdictWord.SAME) >= 90
    assert noisy.count(VerdictWord.SAME) <= 300 * error_limit(300)
    assert at_margin.count(VerdictWord.SAME) <= 300 * error_limit(300)
