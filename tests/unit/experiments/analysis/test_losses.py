"""Losses decide and bound by statistics over seeds, compared with scipy; exact metrics that differ are judged too."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import OPEN, Cause, VariantVerdict, Verdict
from ablate.experiments.design.plan import Plan, make_plan
from ablate.experiments.design.power import ALPHA, FIRST_SHARE
from ablate.experiments.design.rule import rule_of
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, UNCALIBRATED, Circumstances
from ablate.experiments.reporting.verdict_layout import lay_out
from tests.factories import make_receipt, make_spec

LEVEL = FIRST_SHARE * ALPHA
WIDER = {"wider": {"gates": {"dtype": "bfloat16"}}}


def loss_spec(seeds: int, blocks: int, **changes: Any) -> AblationSpec:
    return make_spec(
        **{
            "variants": WIDER,
            "design__seeds": seeds,
            "design__blocks": {"count": blocks},
            "verdict__primary": {"metric": "loss_val", "margin": "0.01 nats", "adopt_if": "0.02 nats"},
            "verdict__require": [],
            **changes,
        }
    )


def receipts_of(plan: Plan, losses: dict[tuple[int, str], float], **changes: Any) -> list[Any]:
    return [
        make_receipt(plan, block, arm, loss_val=losses[block.index, arm], **changes)
        for block in plan.blocks
        for arm in block.order
    ]


def judged(spec: AblationSpec, losses: dict[tuple[int, str], float], known: Circumstances = UNCALIBRATED) -> Verdict:
    plan = make_plan(spec)
    return judge(plan, spec, receipts_of(plan, losses), known)


def only(verdict: Verdict) -> VariantVerdict:
    (variant,) = verdict.variants
    return variant


def by_seed(plan: Plan, losses: dict[tuple[int, str], float]) -> tuple[Any, Any]:
    """Return the mean losses of the variant and of the baseline, one per seed."""
    seeds = sorted({block.seed for block in plan.blocks})
    return tuple(  # type: ignore[return-value]
        np.array([np.mean([losses[b.index, arm] for b in plan.blocks if b.seed == seed]) for seed in seeds])
        for arm in ("wider", "baseline")
    )


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_a_loss_is_judged_over_seeds_like_the_oracle(seed: int, relative: bool) -> None:
    rng = np.random.default_rng([seed, relative])
    seeds = int(rng.integers(6, 20))
    blocks = seeds + int(rng.integers(0, 2 * seeds))
    margin, level = float(rng.choice([0.001, 0.01, 0.1])), float(rng.uniform(1, 9))
    amounts = {"margin": f"{margin:g} nats", "adopt_if": f"{2 * margin:g} nats"}
    if relative:
        amounts = {"margin": f"{100 * margin:g}%", "adopt_if": f"{200 * margin:g}%"}
    spec = loss_spec(
        seeds,
        blocks,
        verdict__primary={"metric": "loss_val", **amounts},
        verdict__require=[{"metric": "loss_final", "max_delta": 100}, {"metric": "loss_val", "not_worse_by": margin}],
    )
    plan = make_plan(spec)
    effect, sd = float(rng.normal(0, 3 * margin)), margin * float(10 ** rng.uniform(-1, 1))
    losses = {
        (b.index, arm): level + 0.5 * b.seed / seeds + rng.normal(0, sd) + effect * (arm == "wider")
        for b in plan.blocks
        for arm in b.order
    }
    variant = only(judged(spec, losses))
    own, base = by_seed(plan, losses)
    mean, scale = float(np.mean(own - base)), float(np.mean(base))
    limit = margin * scale if relative else margin
    se = float(np.std(own - base, ddof=1)) / math.sqrt(seeds)
    p_differs = float(stats.ttest_rel(own, base).pvalue)
    p_same = max(stats.t.sf((limit + mean) / se, seeds - 1), stats.t.sf((limit - mean) / se, seeds - 1))
    primary = variant.primary
    assert primary is not None
    assert (primary.blocks, primary.widened, primary.place_pct) == (seeds, 1.0, 0.0)
    assert primary.baseline == pytest.approx(scale)
    assert primary.delta_pct == pytest.approx(100 * mean / scale, rel=1e-6, abs=1e-9)
    assert (primary.p_holm, primary.p_same) == pytest.approx((p_differs, p_same), rel=1e-5, abs=1e-12)
    verdict = VerdictWord.INCONCLUSIVE
    reach = stats.t.ppf(1 - LEVEL / 2, seeds - 1) * se
    if abs(mean) - reach > limit:
        verdict = VerdictWord.BETTER if mean < 0 else VerdictWord.WORSE
    elif p_same <= LEVEL:
        verdict = VerdictWord.SAME
    assert variant.measured is verdict
    assert variant.cause in (None, *OPEN, Cause.SPREADS), "the device needs no A/A blocks"
    p_met, p_broken = stats.t.sf((margin - mean) / se, seeds - 1), stats.t.sf((mean - margin) / se, seeds - 1)
    required = variant.requirements[1]
    assert (required.passed, required.undecided) == (p_met <= LEVEL, p_met > LEVEL and p_broken > LEVEL)
    if variant.verdict is VerdictWord.BETTER and required.passed:
        assert variant.decision is (Decision.ADOPT if -mean >= 2 * limit else Decision.REJECT)


def test_a_requirement_is_not_met_by_silence() -> None:
    """Baseline losses with a standard deviation of 0.1 hide a rise of 0.05, and show one of 0.3."""
    spec = loss_spec(
        6,
        6,
        verdict__primary={"metric": "tokens_per_s", "margin": "0.5%"},
        verdict__require=[{"metric": "loss_val", "not_worse_by": 0.05}],
    )
    plan = make_plan(spec)
    noise = np.random.default_rng(3).normal(0, 0.1, (6, 2))

    def with_rise(rise: float) -> VariantVerdict:
        receipts = [
            make_receipt(
                plan,
                block,
                arm,
                loss_val=7.5 + noise[block.index, int(arm == "wider")] + rise * (arm == "wider"),
                tokens_per_s=5000.0 * (1.03 if arm == "wider" else 1),
            )
            for block in plan.blocks
            for arm in block.order
        ]
        return only(judge(plan, spec, receipts, CALIBRATED))

    for rise, undecided, decision in ((0.0, True, Decision.INCONCLUSIVE), (0.5, False, Decision.REJECT)):
        variant = with_rise(rise)
        (required,) = variant.requirements
        assert variant.verdict is VerdictWord.BETTER
        assert (required.passed, required.undecided, variant.decision) == (False, undecided, decision), required.detail
    assert "seeds would prove a variant without a change" in with_rise(0.0).requirements[0].detail


@pytest.mark.parametrize("known", [CALIBRATED, UNCALIBRATED])
def test_a_speed_is_proved_on_a_calibrated_device_only(known: Circumstances) -> None:
    spec = loss_spec(6, 6, verdict__require=[{"metric": "tokens_per_s", "not_worse_by": "5%"}])
    plan = make_plan(spec)
    losses = {(b.index, arm): 7.5 + 0.001 * b.seed for b in plan.blocks for arm in b.order}
    (required,) = only(judge(plan, spec, receipts_of(plan, losses), known)).requirements
    assert (required.passed, required.undecided) == (known is CALIBRATED, known is UNCALIBRATED), required.detail


@pytest.mark.parametrize(("require", "timed"), [([], False), ([{"metric": "step_s", "not_worse_by": "5%"}], True)])
def test_the_guards_of_times_apply_where_a_time_is_judged(require: list[Any], timed: bool) -> None:
    plan = make_plan(loss_spec(6, 6, verdict__require=require))
    assert plan.timed is timed
    primary = {"metric": "peak_allocated_gib", "margin": "1%"}
    assert make_plan(make_spec(variants=WIDER, verdict__primary=primary, verdict__require=require)).timed is timed


def test_an_arm_that_ignores_its_seed_gets_no_verdict() -> None:
    spec = loss_spec(6, 6)
    losses = {(b, arm): 7.5 if arm == "wider" else 7.7 + b / 1000 for b in range(6) for arm in ("wider", "baseline")}
    variant = only(judged(spec, losses))
    assert (variant.measured, variant.cause) == (VerdictWord.BETTER, Cause.REPEATED_SEEDS)


@pytest.mark.parametrize("step", [0.0, 1e-4, 0.01])
@pytest.mark.parametrize("seeds", [6, 24])
@pytest.mark.parametrize(("alike", "repeats"), [((), False), (("wider",), False), (("wider", "baseline"), True)])
def test_two_seeds_with_the_same_two_losses_repeat_one_run(
    alike: tuple[str, ...], repeats: bool, seeds: int, step: float
) -> None:
    """The two need not be neighbours. Losses in few steps meet by chance, so equal ones prove nothing there."""
    rng = np.random.default_rng([seeds, len(alike)])
    spec = loss_spec(seeds, seeds)
    blocks = make_plan(spec).blocks
    for _ in range(20):
        drawn = {arm: 7.5 - 3.0 * (arm == "wider") + rng.normal(0, 0.1, seeds) for arm in ("wider", "baseline")}
        one, other = rng.choice(seeds, 2, replace=False)
        for arm in alike:
            drawn[arm][one] = drawn[arm][other]
        values = {arm: np.round(own / step) * step if step else own for arm, own in drawn.items()}
        variant = only(judged(spec, {(b.index, arm): float(values[arm][b.index]) for b in blocks for arm in values}))
        seen = repeats and step < 0.01
        assert (variant.cause is Cause.REPEATED_SEEDS) is seen, variant.reason
        named = {blocks[int(at)].seed for at in (one, other)}
        assert not seen or f"seeds {min(named)} and {max(named)} give the same loss_val" in variant.reason


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 1e200, 0.0, 5e-324, -3.0])
def test_no_loss_stops_the_judge_or_its_pages(value: float) -> None:
    spec = loss_spec(6, 6, verdict__require=[{"metric": "loss_val", "not_worse_by": "1%"}])
    plan = make_plan(spec)
    losses = {(b.index, arm): 7.5 + b.seed / 100 for b in plan.blocks for arm in b.order}
    for places in ([(2, "wider")], [(2, "wider"), (3, "baseline")], list(losses)):
        verdict = judge(plan, spec, receipts_of(plan, losses | dict.fromkeys(places, value)), UNCALIBRATED)
        assert only(verdict).decision is not Decision.ADOPT
        assert lay_out(verdict).variants


def test_amounts_are_in_the_rule_and_on_the_page_with_their_percent() -> None:
    spec = loss_spec(6, 6)
    assert rule_of(spec)["primary"] == {"metric": "loss_val", "margin": "0.01 nats", "adopt_if": "0.02 nats"}
    losses = {(b, arm): 5.0 - 0.5 * (arm == "wider") + b / 1000 for b in range(6) for arm in ("wider", "baseline")}
    verdict = judged(spec, losses)
    assert verdict.rule["primary"]["margin_pct"] == pytest.approx(100 * 0.01 / 5.0025)
    variant = only(verdict)
    assert (variant.verdict, variant.decision) == (VerdictWord.BETTER, Decision.ADOPT)
    assert "6 seeds (-0.5 nats from a mean of 5.0025)" in variant.reason


def test_pages_of_a_loss_speak_of_seeds_and_not_of_the_clock() -> None:
    spec = loss_spec(6, 6)
    losses = {(b, arm): 5.0 - 0.5 * (arm == "wider") + b / 1000 for b in range(6) for arm in ("wider", "baseline")}
    laid_out = lay_out(judged(spec, losses))
    notes = " ".join(table.note for table in laid_out.tables)
    assert "Effect: mean difference over the seeds, in percent of the baseline's mean." in notes
    assert "6 seeds" in laid_out.variants[0].sentence
    assert "A/A" not in laid_out.caveat


def test_memory_that_differs_by_one_byte_in_one_repeat_is_judged_by_statistics() -> None:
    spec = make_spec(
        variants=WIDER,
        design__seeds=[1],
        design__blocks={"count": 6},
        verdict__primary={"metric": "peak_allocated_gib", "margin": "1%"},
        verdict__require=[],
        placement={"node_class": "h200"},
    )
    plan = make_plan(spec)

    def variant(odd: int) -> VariantVerdict:
        receipts = [
            make_receipt(plan, b, arm, peak_bytes=2**30 // (2 if arm == "wider" else 1) + 2 * odd * (b.index == 3))
            for b in plan.blocks
            for arm in b.order
        ]
        return only(judge(plan, spec, receipts, UNCALIBRATED))

    exact, noisy = variant(0), variant(1)
    assert exact.exact is not None
    assert (noisy.exact, noisy.verdict, noisy.decision) == (None, VerdictWord.BETTER, Decision.ADOPT)
    assert noisy.primary is not None
    assert noisy.primary.delta_pct == pytest.approx(-50, abs=1e-5)
    assert any("judged by statistics" in note for note in noisy.notes)


@pytest.mark.parametrize(("seeds", "share"), [(6, "39 %"), (11, "24 %"), (12, "22 %")])
def test_a_good_loss_says_what_its_seeds_cannot_exclude_in_the_first_line_below_twelve(seeds: int, share: str) -> None:
    kept = {"metric": "loss_val", "not_worse_by": 0.1}
    spec = loss_spec(
        seeds, seeds, verdict__primary={"metric": "loss_val", "margin": "0.1 nats"}, verdict__require=[kept]
    )
    losses = {
        (b.index, arm): 3 + 0.005 * (-1) ** (b.seed // 2 + (b.seed + (arm == "wider")) % 2)
        for b in make_plan(spec).blocks
        for arm in b.order
    }
    variant = only(judged(spec, losses))
    caveat = f"{seeds} seeds do not exclude that up to {share} of this arm's runs are far worse than these"
    assert variant.verdict is VerdictWord.SAME
    assert (caveat in variant.reason, caveat in variant.notes) == (seeds < 12, seeds >= 12)
    assert caveat in variant.requirements[0].detail
    assert (1 - float(share[:-2]) / 100) ** seeds == pytest.approx(0.05, rel=0.1)
