"""A year of nights of `ablate nightly`: false alarms, nights until a loss is confirmed, and the judge itself."""

from dataclasses import replace

import numpy as np
import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.power import alpha_of
from ablate.experiments.outcomes import AblationState
from ablate.experiments.records.circumstances import CALIBRATED, EarlierAblation, Family
from ablate.service.cli.commits.nights import NightWord, answer_of, better_arms
from tests.simulation import noise
from tests.simulation.cases import noisy
from tests.simulation.nights import MARGIN_PCT, Year, confirmed, detected, losing_the_margin, new_commit, nights_until
from tests.simulation.noise import Draw
from tests.simulation.rates import rate
from tests.simulation.test_cases import is_at_least, is_at_most
from tests.simulation.test_words import planned, receipts_of
from tests.simulation.words import windows_of, words_of

MOST_FALSE = 1 / 200
"""False alarms a night."""
BY_LEVELS = alpha_of(1) / 2 * alpha_of(2) / 2
"""The largest share at exact levels: 2 % of both arms together, then 0.25 %."""


def test_the_levels_allow_a_false_alarm_in_twenty_thousand_nights() -> None:
    assert pytest.approx(1 / 20_000) == BY_LEVELS


@pytest.mark.parametrize(
    ("year", "nominal"),
    [
        (Year(), BY_LEVELS),
        (losing_the_margin(), BY_LEVELS),
        (losing_the_margin(blocks=6), BY_LEVELS),
        (losing_the_margin(noise=noise.heavy_tails), MOST_FALSE),
        (losing_the_margin(noise=noise.following_arms), MOST_FALSE),
        (Year(noise=noise.skewed_in_variants), MOST_FALSE),
        (Year(noise=new_commit(noise.wider_in_variants)), MOST_FALSE),
    ],
)
def test_a_year_has_at_most_one_false_alarm_in_two_hundred_nights(year: Year, nominal: float) -> None:
    first, both = confirmed(year, 40)
    assert is_at_most(rate(both), nominal)
    assert not (both & ~first).any()


def test_a_second_ablation_does_not_help_against_rare_slow_runs_of_the_earlier_commits() -> None:
    """One run in ten of theirs is 50 % slower, which the others balance: both ablations may have none of these."""
    _first, both = confirmed(Year(noise=noise.long_mode_of_variants), 40)
    assert is_at_least(rate(both), 0.2)
    _first, enough = confirmed(Year(noise=noise.long_mode_of_variants, blocks=106, nights=20), 40)
    assert is_at_most(rate(enough), MOST_FALSE)


@pytest.mark.parametrize(("step_pct", "share", "within"), [(-1, 0.9, 40), (-2, 0.85, 1), (-2, 0.99, 4), (-5, 1.0, 1)])
def test_a_loss_is_confirmed_within_nights(step_pct: float, share: float, within: int) -> None:
    year = Year(step_pct=step_pct, at=5, nights=5 + within)
    _first, both = confirmed(year, 200)
    assert is_at_least(rate(nights_until(both, 5) <= within), share)


def test_small_losses_are_confirmed_by_their_sum_where_each_is_within_the_margin() -> None:
    _first, both = confirmed(Year(creep_pct=-0.2, nights=15), 100)
    assert nights_until(both, 0).max() <= 15
    assert (both.argmax(axis=1) + 1).min() > MARGIN_PCT / 0.2


def test_a_detector_on_history_alone_is_later_where_the_machine_drifts_and_has_more_false_alarms() -> None:
    drifting = Year(step_pct=-2, at=60, nights=75, drift=0.01)
    own, other = (nights_until(alarms(drifting, 60)[-1], 60) for alarms in (confirmed, lambda *a: (detected(*a),)))
    assert np.median(own) == 1
    assert np.median(other) > 2
    assert rate(detected(Year(drift=0.01), 20)).value > 10 * BY_LEVELS


@pytest.mark.parametrize("repetition", range(12))
def test_the_judge_and_the_command_say_the_same_of_a_night(repetition: int) -> None:
    """The earlier commits are better by 0.2 to 2.4 %: some nights are accepted at once, some after the second one."""
    effects = np.log1p(np.array([0.002, 0.001]) * (repetition + 1))
    draws = [
        _slower(noisy("normal")(np.random.default_rng([repetition, asking]), 1, 10, 3), effects) for asking in (1, 2)
    ]
    words = [
        words_of(windows_of(one), alpha=alpha_of(asking), margin_pct=MARGIN_PCT, effects=np.zeros(2)).better[0]
        for asking, one in enumerate(draws, 1)
    ]
    verdicts = [_judged(one, asking) for asking, one in enumerate(draws, 1)]
    assert [[one.arm for one in better_arms(verdict)] for verdict in verdicts] == [
        [f"v{index}" for index in np.flatnonzero(flags)] for flags in words
    ]
    answer = answer_of(*verdicts)
    assert answer is not None
    assert (answer.word is NightWord.WORSE) == (words[0].any() and words[1].any())
    assert (answer_of(verdicts[0], None) is None) == words[0].any()


def _slower(draw: Draw, effects: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Draw:
    seconds = draw.seconds.copy()
    seconds[:, :, 1:] *= np.exp(-effects)[:, None]
    return replace(draw, seconds=seconds, aa=None)


def _judged(draw: Draw, asking: int) -> Verdict:
    spec, plan = planned(10, 2, 0)
    earlier = EarlierAblation(
        ablation="a", name="a", state=AblationState.COMPLETED, created_at="", asked=("v0", "v1"), words={}
    )
    family = Family(question_digest="sha256:q", earlier=(earlier,) * (asking - 1))
    return judge(plan, spec, receipts_of(draw, 0, plan), CALIBRATED.model_copy(update={"family": family}))
