"""Events and noise of one arm alone: designs with too few runs, and arms that scatter differently."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.looks import at_look
from ablate.experiments.analysis.noise.calibrate import calibrate, key_of
from ablate.experiments.analysis.sizing import plan_spec
from ablate.experiments.analysis.verdicts import Cause
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import Plan, make_plan
from ablate.experiments.design.power import alpha_of, blocks_for_events
from ablate.experiments.design.rule import blocks_for_rarest_event
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting.verdict_layout import lay_out
from tests.calibrations import noisy_blocks
from tests.factories import make_receipt, make_receipts, make_spec, spec_values

ONE = {"psiv-on": {"gates": {"psiv_cache": True}}}
LOSS = {"metric": "loss_val", "margin": "0.02 nats"}


def asking(share: str, blocks: object, **changes: object) -> AblationSpec:
    values = spec_values(variants=ONE, design__blocks=blocks, **changes)
    values["verdict"]["rarest_event"] = share
    return parse_spec(json.dumps(values).encode(), "application/json")


def refused(spec: AblationSpec) -> tuple[str, str, str]:
    with pytest.raises(SpecError) as caught:
        make_plan(spec)
    (problem,) = caught.value.problems
    return problem.pointer, problem.detail, str(problem.hint)


def test_so_many_events_are_expected_that_a_t_test_keeps_its_error_rate() -> None:
    assert [blocks_for_events(1.0, level) for level in (0.04, 0.01, 0.001)] == [8, 11, 17]
    rng = np.random.default_rng(1)
    for _ in range(200):
        share, level = float(10 ** rng.uniform(-3, 0)), float(10 ** rng.uniform(-6, -1.3))
        blocks = blocks_for_events(share, level)
        assert blocks * share >= 2.5 * math.log(1 / level) - 1 > (blocks - 1) * share


@pytest.mark.parametrize("share", ["90%", "20%", "10%", "2.5%"])
def test_a_design_with_too_few_runs_is_refused_and_the_hint_is_enough(share: str) -> None:
    needed = blocks_for_events(float(share[:-1]) / 100, alpha_of(1))
    where, detail, hint = refused(asking(share, {"count": max(6, needed - 1)})) if needed > 6 else ("", "", "")
    assert where == "#/verdict/rarest_event"
    assert f"events in {share} of one arm's runs need {needed} blocks" in detail
    assert f"use {needed} blocks" in hint
    assert len(make_plan(asking(share, {"count": needed})).blocks) == needed


def test_more_variants_need_more_and_impossible_or_senseless_numbers_are_refused() -> None:
    two = spec_values(design__blocks={"count": 2000})
    two["verdict"]["rarest_event"] = "10%"
    both = blocks_for_rarest_event(parse_spec(json.dumps(two).encode(), "application/json"))
    one = blocks_for_rarest_event(asking("10%", {"count": 2000}))
    assert one is not None
    assert both is not None
    assert one < both
    assert "blocks end at 2,000: a larger share" in refused(asking("0.1%", {"count": 2000}))[2]
    many = {"design__seeds": 64, "verdict__primary": LOSS}
    assert "seeds end at 64: a larger share" in refused(asking("10%", {"count": 64}, **many))[2]
    assert make_plan(asking("12%", {"count": 64}, **many)).blocks
    exact = {"metric": "peak_allocated_gib", "margin": "0%"}
    assert "decides by its value" in refused(asking("10%", {"count": 200}, verdict__primary=exact))[1]


def test_a_look_before_enough_runs_gives_no_verdict_and_goes_on() -> None:
    spec = asking("20%", {"looks": [6, 40]})
    plan = make_plan(spec)
    fast = make_receipts(plan, {"psiv-on": 1.05}, sd=0.001)
    early = [receipt for receipt in fast if receipt.ids.block_index < 6]
    (variant,) = judge(plan, spec, early, CALIBRATED).variants
    assert (variant.verdict, variant.measured, variant.cause) == (
        VerdictWord.INCONCLUSIVE,
        VerdictWord.BETTER,
        Cause.RARE_EVENTS,
    )
    assert "events in 20 % of one arm's runs need 36 blocks, 6 counted" in variant.reason
    assert at_look(plan, spec, early, CALIBRATED, 0).go_on
    (variant,) = judge(plan, spec, fast, CALIBRATED).variants
    assert variant.verdict is VerdictWord.BETTER


def test_auto_takes_the_larger_number() -> None:
    spec = make_spec(variants=ONE)
    known = [calibrate(key_of(spec, make_receipt(make_plan(spec), 0, "baseline")), noisy_blocks(sd=0.002))]
    values = spec_values(variants=ONE, design__blocks="auto")
    values["verdict"]["rarest_event"] = "20%"
    body = json.dumps(values).encode()
    text, _, spec, _ = plan_spec(body, "application/json", parse_spec(body, "application/json"), lambda: known)
    assert spec.design.blocks.number == 36
    assert b"verdict.rarest_event 20% needs so many" in text.splitlines()[0]


def noisy(plan: Plan, draw: object) -> list[Receipt]:
    """Return receipts whose variant is 5 % faster and has the drawn noise in ln(tokens/s)."""
    rng = np.random.default_rng(7)
    drawn = {"baseline": rng.normal(0, 2e-4, len(plan.blocks)), "psiv-on": draw(rng, len(plan.blocks))}  # type: ignore[operator]
    speed = {"psiv-on": 1.05}
    return [
        make_receipt(plan, b, a, tokens_per_s=float(5000 * speed.get(a, 1) * np.exp(drawn[a][b.index])))
        for b in plan.blocks
        for a in b.order
    ]


@pytest.mark.parametrize(
    ("blocks", "verdict"),
    [
        (20, VerdictWord.BETTER),
        (10, VerdictWord.INCONCLUSIVE),
    ],
)
def test_an_arm_that_scatters_more_to_both_sides_gets_its_verdict_from_16_blocks(
    blocks: int, verdict: VerdictWord
) -> None:
    spec = make_spec(variants=ONE, design__blocks={"count": blocks})
    plan = make_plan(spec)
    receipts = noisy(plan, lambda rng, number: 0.01 * np.resize([1.0, -1.0], number) + rng.normal(0, 1e-3, number))
    (variant,) = judge(plan, spec, receipts, CALIBRATED).variants
    assert (variant.verdict, variant.measured) == (verdict, VerdictWord.BETTER)
    assert any(note.startswith("the variant's runs are less steady by a factor of ") for note in variant.notes)


def test_an_arm_with_a_tail_to_one_side_gets_none() -> None:
    spec = make_spec(variants=ONE, design__blocks={"count": 20})
    plan = make_plan(spec)
    receipts = noisy(plan, lambda rng, number: -0.01 * rng.lognormal(0, 1.5, number))
    (variant,) = judge(plan, spec, receipts, CALIBRATED).variants
    assert variant.cause in (Cause.SPREADS, Cause.NOT_PROVED)
    assert variant.verdict is VerdictWord.INCONCLUSIVE


@pytest.mark.parametrize(("blocks", "share"), [(6, 39), (11, 24), (12, 22), (30, 10)])
@pytest.mark.parametrize(
    ("speed", "word"), [(1.05, VerdictWord.BETTER), (1.0, VerdictWord.SAME), (0.9, VerdictWord.WORSE)]
)
def test_a_good_speed_says_which_share_of_slow_runs_its_blocks_cannot_exclude(
    blocks: int, share: int, speed: float, word: VerdictWord
) -> None:
    """The share is the bound of Clopper and Pearson for no event in so many runs."""
    spec = make_spec(variants=ONE, design__blocks={"count": blocks})
    plan = make_plan(spec)
    verdict = judge(plan, spec, make_receipts(plan, {"psiv-on": speed}, sd=0.0005), CALIBRATED)
    (variant,) = verdict.variants
    caveat = f"{blocks} blocks do not exclude that up to {share} % of this arm's runs are far worse than these"
    good, few = word is not VerdictWord.WORSE, blocks < 12
    assert stats.beta.ppf(0.95, 1, blocks) == pytest.approx(share / 100, abs=0.005)
    assert variant.verdict is word
    assert (caveat in variant.reason, caveat in variant.notes) == (good and few, good and not few)
    (shown,) = lay_out(verdict).variants
    assert (caveat in shown.sentence, caveat in shown.remarks) == (good and few, good and not few)
