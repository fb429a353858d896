"""Sessions keep to their budget where greed keeps something in every session."""

import json

import numpy as np
import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.proposals import proposed
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.power import SESSION_ALPHA, session_level
from ablate.experiments.records.circumstances import CALIBRATED
from tests.simulation.cases import NO_MARGIN_PCT, noisy
from tests.simulation.noise import SD, Draw
from tests.simulation.rates import rate
from tests.simulation.sessions import mixed, nulls, planted, sessions
from tests.simulation.test_cases import is_at_least, is_at_most
from tests.simulation.test_words import check, planned, receipts_of
from tests.simulation.words import windows_of, words_of

NORMAL = noisy("normal")


def test_sessions_of_null_proposals_keep_nothing_and_greedy_ones_keep_half() -> None:
    kept = sessions(NORMAL, nulls(250, proposals=40), blocks=6)
    assert is_at_most(kept.any_false, SESSION_ALPHA / 2)
    assert kept.any_false_by_greed.value == 1
    assert kept.by_greed.mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("at", "least", "most"), [(1, 0.8, 1.0), (10, 0.45, 0.75), (100, 0.08, 0.35)])
def test_a_late_improvement_is_kept_less_often(at: int, least: float, most: float) -> None:
    share = rate(sessions(NORMAL, planted(100, at=at, effect_pct=1.0), blocks=10).by_budget[:, -1])
    assert is_at_least(share, least)
    assert is_at_most(share, most)


def test_kept_gains_are_too_large_and_less_so_when_shrunk() -> None:
    rare, frequent = (
        sessions(NORMAL, planted(1500, at=1, effect_pct=effect), blocks=6).too_large(effect) for effect in (0.75, 2.0)
    )
    assert rare[0] > 1.1
    assert 1.0 < rare[1] < rare[0] - 0.03
    assert frequent == pytest.approx((1.0, 1.0), abs=0.02)


def test_a_margin_protects_a_session_from_noise_that_aa_blocks_do_not_show() -> None:
    noise = noisy("each arm autocorrelated 0.6, the A/A blocks not")
    none, some = (
        sessions(noise, nulls(150, proposals=100), blocks=10, margin_pct=margin).any_false
        for margin in (NO_MARGIN_PCT, 0.75 * 100 * SD)
    )
    assert is_at_least(none, 0.2)
    assert is_at_most(some, 0.03)


def test_few_of_the_kept_proposals_are_wrong_where_some_improve() -> None:
    kept = sessions(NORMAL, mixed(60, share=0.1, effect_pct=2.0), blocks=10)
    assert kept.false_share() <= SESSION_ALPHA
    assert kept.false_share(greed=True) > 0.5
    assert is_at_least(kept.of_improvements, 0.85)


def test_kept_proposals_raise_the_level_of_later_ones_only() -> None:
    effects = nulls(3, proposals=6)
    effects[:, 1] = 20.0
    kept = sessions(NORMAL, effects, blocks=6)
    assert kept.by_budget[:, 1].all()
    assert session_level(3, [2]) > session_level(3) > session_level(4)


@pytest.mark.parametrize("number", [1, 20, 200])
def test_the_judge_says_the_same_at_the_level_of_a_proposal(number: int) -> None:
    drawn = NORMAL(np.random.default_rng(number), 4, 10, 2)
    seconds = drawn.seconds.copy()
    seconds[:, :, 1:] *= np.exp(-np.log1p([0.0, 0.008, 0.012, 0.03]))[:, None, None, None]
    draw = Draw(seconds=seconds, places=drawn.places, rerun=drawn.rerun)
    level = session_level(number)
    words = words_of(windows_of(draw), alpha=level, margin_pct=0.5, effects=np.zeros(1))
    for repetition in range(4):
        plain = json.dumps(planned(10, 1, repetition)[0].model_dump(mode="json")).encode()
        _, spec = proposed(
            plain, "application/json", parse_spec(plain, "application/json"), "night", number=number, kept=()
        )
        plan = make_plan(spec)
        (variant,) = judge(plan, spec, receipts_of(draw, repetition, plan), CALIBRATED).variants
        assert variant.primary is not None
        assert variant.primary.alpha == level
        check(variant, words, (repetition, 0))
