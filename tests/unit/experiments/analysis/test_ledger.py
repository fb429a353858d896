"""The ledger of A/A ablations: bounds against exact binomial tails, counts against planted words."""

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.noise.admission import keep_ledger, needed, upper_bound
from ablate.experiments.analysis.noise.calibrate import calibrate
from ablate.experiments.records.calibration import Ledger
from ablate.experiments.reporting.wording import false_verdicts
from tests.calibrations import KEY, noisy_blocks


@pytest.mark.parametrize(("errors", "trials"), [(0, 59), (1, 93), (2, 124), (3, 153)])
def test_what_supports_at_most_five_percent_is_that_of_the_protocol(errors, trials):
    assert needed(errors) == trials
    assert upper_bound(errors, trials) <= 0.05 < upper_bound(errors, trials - 1)


@pytest.mark.parametrize(("errors", "trials"), [(0, 1), (0, 20), (1, 7), (3, 40), (5, 400)])
def test_at_the_bound_so_few_errors_have_a_chance_of_five_percent(errors, trials):
    assert stats.binom.cdf(errors, trials, upper_bound(errors, trials)) == pytest.approx(0.05)


def test_nothing_known_is_a_bound_of_one():
    assert keep_ledger([]) == Ledger()
    assert upper_bound(0, 0) == upper_bound(3, 3) == 1.0
    assert "is unknown" in false_verdicts(Ledger())


def test_every_ablation_counts_once_and_false_words_are_found():
    quiet = [noisy_blocks(6, sd=0.001, seed=i, ablation=f"abl_{i}") for i in range(5)]
    loud = [
        block.model_copy(update={"difference": block.difference - 0.02}) for block in noisy_blocks(20, ablation="abl_x")
    ]
    short = noisy_blocks(5, ablation="abl_y", difference=0.5)
    ledger = keep_ledger([calibrate(KEY, [block for blocks in [*quiet, loud, short] for block in blocks])])
    assert (ledger.ablations, ledger.false_words, ledger.differing) == (6, 1, 1)
    assert ledger.upper_bound == upper_bound(1, 6)
    text = false_verdicts(ledger).replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith(
        "1 false verdict in 6 A/A ablations, so the rate of false verdicts is at most 58.2 % (95 % confidence"
    )
    assert text.endswith("It takes 93 A/A ablations to support 5 %.")


def test_a_difference_within_the_margin_is_no_false_word():
    blocks = [b.model_copy(update={"difference": b.difference + 0.004}) for b in noisy_blocks(20, sd=0.001)]
    ledger = keep_ledger([calibrate(KEY, blocks)])
    assert (ledger.ablations, ledger.false_words, ledger.differing) == (1, 0, 1)


def test_words_of_pure_noise_stay_below_their_level():
    calibrations = [calibrate(KEY, noisy_blocks(8, sd=0.01, seed=seed, ablation=f"a{seed}")) for seed in range(50)]
    assert keep_ledger(calibrations).false_words == 0  # the mean of these is zero by construction
    shifted = []
    rng = np.random.default_rng(0)
    for seed in range(1500):
        shift = float(rng.normal(0, 0.01 / 8**0.5))
        blocks = noisy_blocks(8, sd=0.01, seed=seed, ablation=f"s{seed}")
        shifted.append(calibrate(KEY, [b.model_copy(update={"difference": b.difference + shift}) for b in blocks]))
    ledger = keep_ledger(shifted)
    _, high = stats.binom.interval(0.999, 1500, 0.05)
    assert ledger.false_words <= high
    assert ledger.false_words > 0
