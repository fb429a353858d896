"""Numbers of validation curves, and verdicts on them, compared with numpy and scipy on drawn curves."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import interpolate, stats

from ablate.experiments.analysis.curves import loss_at, place_of
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.calibrate import key_of
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict
from ablate.experiments.design.aa_spec import CONTENT_TYPE, calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import Plan, make_plan
from ablate.experiments.design.power import ALPHA, FIRST_SHARE
from ablate.experiments.design.rule import rule_of
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import Decision, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED, UNCALIBRATED, Circumstances
from ablate.experiments.reporting.pages.circumstance_tables import rule_in_words
from ablate.experiments.reporting.sentences import confound
from ablate.experiments.reporting.verdict_layout import lay_out
from tests.factories import make_receipt, make_spec

LEVEL = FIRST_SHARE * ALPHA
TIMED, EVERY, WARMUP = 60, 6, 1
POINTS = TIMED // EVERY
TO = {"metric": "tokens_to_loss", "margin": "1%", "target": "5 nats"}
Curves = Mapping[tuple[int, str], Sequence[float]]


def curve_spec(metric: str, seeds: int = 8, **changes: Any) -> AblationSpec:
    given = {"metric": metric, "margin": "2%", "adopt_if": "5%"}
    if metric != "loss_val_at_time":
        given["target"] = "5 nats"
    steps = {"warmup": WARMUP, "warmup_s": 0, "timed": TIMED, "val_rows": 2, "val_every": EVERY}
    return make_spec(
        **{
            "workload__steps": steps,
            "variants": {"wider": {"gates": {"dtype": "bfloat16"}}},
            "design__seeds": seeds,
            "design__blocks": {"count": seeds},
            "verdict__primary": given,
            "verdict__require": [],
            **changes,
        }
    )


def judged(
    spec: AblationSpec, curves: Curves, known: Circumstances = CALIBRATED, speeds: Mapping[tuple[int, str], float] = {}
) -> VariantVerdict:
    plan = make_plan(spec)
    verdict = judge(plan, spec, receipts_of(plan, curves, speeds), known)
    assert lay_out(verdict).variants
    (variant,) = verdict.variants
    return variant


def receipts_of(plan: Plan, curves: Curves, speeds: Mapping[tuple[int, str], float] = {}) -> list[Any]:
    return [
        make_receipt(
            plan,
            block,
            arm,
            val_losses=curves[block.index, arm],
            tokens_per_s=speeds.get((block.index, arm), 5000.0),
            wall_s=120.0,
        )
        for block in plan.blocks
        for arm in block.order
    ]


def drawn_curves(rng: np.random.Generator, seeds: int, effect: float = 0.0, noise: float = 0.0) -> Curves:
    """Draw falling curves of power laws, with luck of the seed, an effect of the variant, and noise of validations."""
    steps = EVERY * np.arange(1, POINTS + 1)
    curves = {}
    for seed in range(seeds):
        start, power = rng.uniform(7.0, 7.2), rng.uniform(0.1, 0.12)
        for arm in ("baseline", "wider"):
            own = start * steps ** -(power + rng.normal(0, 0.002)) + effect * (arm == "wider")
            curves[seed, arm] = [float(loss) for loss in own + rng.normal(0, noise, POINTS)]
    return curves


@pytest.mark.parametrize("seed", range(60))
def test_a_loss_at_a_place_is_that_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    number = int(rng.integers(3, 40))
    places = np.cumsum(10.0 ** rng.uniform(-3, 6, number))
    losses = rng.uniform(0, 1e3, number)
    curve = list(zip(places.tolist(), losses.tolist(), strict=True))
    for place in [*rng.uniform(places[0], places[-1], 20), *places]:
        loss = loss_at(curve, float(place))
        assert loss.value == pytest.approx(float(np.interp(place, places, losses)), rel=1e-9, abs=1e-9)
        assert loss.error >= 0
    for outside in (places[0] * (1 - 1e-9), places[-1] * (1 + 1e-9)):
        with pytest.raises(ValueError, match="outside of the curve"):
            loss_at(curve, float(outside))


@pytest.mark.parametrize("seed", range(60))
def test_the_place_of_a_target_is_the_first_crossing_of_the_line(seed: int) -> None:
    rng = np.random.default_rng(seed)
    number = int(rng.integers(3, 40))
    places = np.cumsum(10.0 ** rng.uniform(-3, 6, number))
    losses = np.sort(rng.uniform(0, 10, number))[::-1] + rng.normal(0, rng.choice([0.0, 1.0]), number)
    curve = list(zip(places.tolist(), losses.tolist(), strict=True))
    for target in [*rng.uniform(losses.min(), losses.max(), 20), losses.min(), losses.max()]:
        crossing = place_of(curve, float(target))
        below = np.flatnonzero(losses <= target)
        if below[0] == 0:
            assert crossing is None
            continue
        first = below[0]
        low, high = float(places[first - 1]), float(places[first])
        expected = float(np.interp(-target, [-losses[first - 1], -losses[first]], [low, high]))
        assert crossing is not None
        assert crossing.value == pytest.approx(expected, rel=1e-9)
        assert 0 <= crossing.error <= math.log(high / low) + 1e-12
    assert place_of(curve, float(losses.min()) - 1e-6) is None


SMOOTH: dict[str, Callable[[Any], Any]] = {
    "power law": lambda x: 6 * x**-0.3,
    "exponential": lambda x: 3 + 5 * np.exp(-x / 30),
    "logarithm": lambda x: 9 - np.log(x),
    "parabola": lambda x: 3 + (x - 120) ** 2 / 5000,
}


@pytest.mark.parametrize("shape", SMOOTH)
def test_the_estimated_error_covers_the_true_one_of_smooth_curves(shape: str) -> None:
    true = SMOOTH[shape]
    places = np.arange(10.0, 101.0, 10.0)
    curve = list(zip(places.tolist(), true(places).tolist(), strict=True))
    inverse = interpolate.PchipInterpolator(-true(np.linspace(10, 100, 20_001)), np.linspace(10, 100, 20_001))
    for place in np.linspace(10.5, 99.5, 90):
        loss = loss_at(curve, float(place))
        assert abs(loss.value - true(place)) <= loss.error * 1.0001 + 1e-12
        reached = place_of(curve, float(true(place)))
        assert reached is not None
        assert abs(math.log(reached.value / float(inverse(-true(place))))) <= reached.error * 1.0001 + 1e-9
    assert max(loss_at(curve, p).error for p in (25.0, 55.0, 95.0)) < 0.2


def oracle_place(receipt: Any, losses: Sequence[float], metric: str) -> float:
    """Return tokens or seconds to 5 nats by numpy, from the steps of a trial."""
    timed = receipt.steps[1 + WARMUP :]
    tokens = metric == "tokens_to_loss"
    cost = [step.tokens if tokens else step.seconds for step in timed]
    before = (1 + WARMUP) * float(np.mean(cost))
    at = before + np.cumsum(cost)[EVERY - 1 :: EVERY]
    return float(np.interp(-5.0, -np.array(losses), at))


@pytest.mark.parametrize("metric", ["tokens_to_loss", "seconds_to_loss"])
@pytest.mark.parametrize("seed", range(12))
def test_a_target_is_judged_like_the_oracle(seed: int, metric: str) -> None:
    rng = np.random.default_rng([seed, metric == "tokens_to_loss"])
    seeds = int(rng.integers(6, 16))
    spec = curve_spec(metric, seeds)
    plan = make_plan(spec)
    curves = drawn_curves(rng, seeds, effect=float(rng.normal(0, 0.02)))
    speeds = {
        (block, arm): 5000.0 * math.exp(rng.normal(0, 0.02)) for block in range(seeds) for arm in ("wider", "baseline")
    }
    variant = judged(spec, curves, speeds=speeds)
    receipts = {(one.ids.block_index, one.arm): one for one in receipts_of(plan, curves, speeds)}

    at = {key: oracle_place(receipt, curves[key], metric) for key, receipt in receipts.items()}
    d = np.array([math.log(at[b, "wider"] / at[b, "baseline"]) for b in range(seeds)])
    primary = variant.primary
    assert primary is not None
    assert primary.bias_pct is not None
    bias = math.log1p(primary.bias_pct / 100)
    assert primary.blocks == seeds
    assert primary.differences_pct == pytest.approx(100 * np.expm1(d), rel=1e-6, abs=1e-7)
    if metric == "tokens_to_loss":
        se = float(np.std(d, ddof=1)) / math.sqrt(seeds)
        mean, freedom = float(np.mean(d)), seeds - 1
        assert (primary.place_pct, primary.widened) == (0.0, 1.0)
    else:
        x = [receipts[b, "wider"].ids.position - receipts[b, "baseline"].ids.position for b in range(seeds)]
        line = stats.linregress(x, d)
        mean, se, freedom = line.intercept, line.intercept_stderr, seeds - 2
    assert primary.delta_pct == pytest.approx(100 * math.expm1(mean), rel=1e-6)
    p = 2 * stats.t.sf(max(abs(mean) - bias, 0) / se, freedom)
    assert primary.p_holm == pytest.approx(p, rel=1e-5, abs=1e-12)
    margin = math.log1p(-0.02), math.log1p(0.02)
    p_same = max(
        stats.t.sf((mean - bias - margin[0]) / se, freedom), stats.t.sf((margin[1] - mean - bias) / se, freedom)
    )
    assert primary.p_same == pytest.approx(p_same, rel=1e-5, abs=1e-12)
    reach = stats.t.ppf(1 - LEVEL / 2, freedom) * se + bias
    if p > LEVEL:
        ends = [100 * math.expm1(mean - reach), 100 * math.expm1(mean + reach)]
        assert [primary.ci_low_pct, primary.ci_high_pct] == pytest.approx(ends, rel=1e-5)
    if variant.measured is VerdictWord.BETTER:
        assert mean < 0
        assert p <= LEVEL


@pytest.mark.parametrize("seed", range(12))
def test_a_loss_at_equal_time_is_that_of_the_slower_arms_end(seed: int) -> None:
    """The variant is slower by a third; its loss at its end is compared with the baseline's at that time."""
    rng = np.random.default_rng(seed)
    spec = curve_spec("loss_val_at_time", 8)
    plan = make_plan(spec)
    curves = drawn_curves(rng, 8, noise=0.001)
    speeds = {(b, arm): 5000.0 * (1 if arm == "wider" else 4 / 3) for b in range(8) for arm in ("wider", "baseline")}
    receipts = {(one.ids.block_index, one.arm): one for one in receipts_of(plan, curves, speeds)}
    finals = float(np.mean([curves[b, "baseline"][-1] for b in range(8)]))
    shares = []
    for block in range(8):
        own, base = (receipts[block, arm].summary.curve for arm in ("wider", "baseline"))
        end = min(own[-1].seconds, base[-1].seconds)
        at = [np.interp(end, [p.seconds for p in curve], [p.loss for p in curve]) for curve in (own, base)]
        assert base[-1].seconds == pytest.approx(0.75 * own[-1].seconds, rel=0.01)
        shares.append(100 * (at[0] - at[1]) / finals)
    variant = judged(spec, curves, speeds=speeds)
    primary = variant.primary
    assert primary is not None
    assert primary.differences_pct == pytest.approx(shares, rel=1e-6)
    assert primary.baseline == pytest.approx(finals)
    proved = primary.ci_low_pct > spec.verdict.primary.in_percent(finals).margin_pct
    assert (variant.measured is VerdictWord.WORSE) is proved, "equal curves over tokens, and a slower variant"
    assert primary.ci_low_pct > 0
    assert variant.other_work is None


def test_a_faster_arm_with_the_same_curve_over_tokens_is_better_at_equal_time_only() -> None:
    curves = drawn_curves(np.random.default_rng(1), 8)
    same = {key: curves[key[0], "baseline"] for key in curves}
    speeds = {(b, "wider"): 6500.0 for b in range(8)}
    variants = {
        metric: judged(curve_spec(metric), same, speeds=speeds)
        for metric in ("tokens_to_loss", "seconds_to_loss", "loss_val_at_time")
    }
    assert variants["seconds_to_loss"].verdict is VerdictWord.BETTER
    primary = variants["seconds_to_loss"].primary
    assert primary is not None
    assert primary.delta_pct == pytest.approx(100 * (5000 / 6500 - 1), abs=0.5)
    assert variants["loss_val_at_time"].verdict is VerdictWord.BETTER
    assert variants["tokens_to_loss"].measured in (VerdictWord.SAME, VerdictWord.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("metric", "needs_blocks"), [("tokens_to_loss", False), ("seconds_to_loss", True), ("loss_val_at_time", True)]
)
def test_only_numbers_of_seconds_need_a_calibrated_device(metric: str, needs_blocks: bool) -> None:
    curves = drawn_curves(np.random.default_rng(2), 8, effect=-0.3)
    spec = curve_spec(metric)
    assert spec.verdict.timed is needs_blocks
    assert make_plan(spec).timed is needs_blocks
    variant = judged(spec, curves, UNCALIBRATED)
    assert variant.measured is VerdictWord.BETTER
    assert variant.cause is (Cause.UNCALIBRATED if needs_blocks else None)
    assert judged(spec, curves, CALIBRATED).verdict is VerdictWord.BETTER


def test_a_a_blocks_of_a_curve_measure_its_throughput_with_the_same_schedule() -> None:
    spec = curve_spec("seconds_to_loss")
    calibration = parse_spec(calibration_spec(spec, node_class="cpu", blocks=20, order_seed=1), CONTENT_TYPE)
    assert calibration.verdict.primary.metric == "tokens_per_s"
    other = curve_spec("seconds_to_loss", workload__steps__val_every=2 * EVERY)
    keys = [key_of(one, make_receipt(make_plan(one), 0, "baseline")) for one in (spec, calibration, other)]
    assert keys[0] == keys[1] != keys[2]


OFF = {"never": 1.0, "early": -1.0, "whole": 0.0}
"""What is added to a drawn curve so that it ends above 5 nats, or starts below."""


@pytest.mark.parametrize("never_early", [(0.0, 0.0), (0.3, 0.0), (1.0, 0.0), (0.0, 0.3), (0.2, 0.2)])
@pytest.mark.parametrize("arms", [("wider",), ("baseline",), ("wider", "baseline")])
@pytest.mark.parametrize("seed", range(4))
def test_runs_without_the_target_count_at_their_end_and_against_the_word(
    seed: int, arms: tuple[str, ...], never_early: tuple[float, float]
) -> None:
    """The true numbers lie beyond the ends, so of two words of a change at most one can hold for all of them."""
    rng = np.random.default_rng([seed, len(arms), *(int(10 * share) for share in never_early)])
    seeds = int(rng.integers(6, 16))
    spec, curves = curve_spec("tokens_to_loss", seeds), dict(drawn_curves(rng, seeds, effect=rng.choice([-0.1, 0.1])))
    kinds = {}
    for key, losses in curves.items():
        shares = (*never_early, 1 - sum(never_early)) if key[1] in arms else (0.0, 0.0, 1.0)
        kinds[key] = str(rng.choice(["never", "early", "whole"], p=shares))
        curves[key] = [loss + OFF[kinds[key]] for loss in losses]
    variant = judged(spec, curves)
    receipts = {(one.ids.block_index, one.arm): one for one in receipts_of(make_plan(spec), curves)}
    at = {key: oracle_place(one, curves[key], "tokens_to_loss") for key, one in receipts.items()}
    d = np.array([math.log(at[b, "wider"] / at[b, "baseline"]) for b in range(seeds)])
    larger = {("never", "wider"), ("early", "baseline")} & {(kind, arm) for (_, arm), kind in kinds.items()}
    smaller = {("early", "wider"), ("never", "baseline")} & {(kind, arm) for (_, arm), kind in kinds.items()}
    reach = stats.t.ppf(1 - LEVEL / 2, seeds - 1) * float(np.std(d, ddof=1)) / math.sqrt(seeds)
    if variant.primary is not None:
        reach += math.log1p((variant.primary.bias_pct or 0) / 100)
    better, worse = (
        (not larger and d.mean() + reach < math.log(0.98)),
        (not smaller and d.mean() - reach > math.log(1.02)),
    )
    if better or worse:
        assert variant.measured is (VerdictWord.BETTER if better else VerdictWord.WORSE)
        assert ("count at their end" in variant.reason) is bool(larger | smaller)
    elif larger | smaller:
        assert (variant.measured, variant.cause, variant.primary) == (VerdictWord.INCONCLUSIVE, Cause.TARGET, None)


def with_runs_that_miss(arm: str, blocks: Sequence[int], effect: float = 0.0) -> Curves:
    curves = dict(drawn_curves(np.random.default_rng(3), 8, effect=effect))
    return curves | {(block, arm): [loss + OFF["never"] for loss in curves[block, arm]] for block in blocks}


def test_a_variant_that_reaches_what_the_baseline_never_does_is_better() -> None:
    variant = judged(curve_spec("tokens_to_loss"), with_runs_that_miss("baseline", range(8), effect=-0.3))
    assert (variant.verdict, variant.decision) == (VerdictWord.BETTER, Decision.ADOPT)
    assert "arm 'wider' reached 5 nats with 8 of 8 seeds" in variant.reason
    assert "the baseline reached 5 nats with 0 of 8 seeds (lowest: 5." in variant.reason
    assert "so the change is larger" in variant.reason


def test_one_run_of_the_better_arm_that_misses_the_target_takes_its_word() -> None:
    whole = judged(curve_spec("tokens_to_loss"), with_runs_that_miss("wider", (), effect=-0.3))
    assert whole.verdict is VerdictWord.BETTER
    variant = judged(curve_spec("tokens_to_loss"), with_runs_that_miss("wider", (5,), effect=-0.3))
    assert (variant.verdict, variant.cause, variant.primary) == (VerdictWord.INCONCLUSIVE, Cause.TARGET, None)
    assert "arm 'wider' reached 5 nats with 7 of 8 seeds" in variant.reason


def ending_at(losses: Sequence[float], end: float) -> list[float]:
    """Return the curve moved so that its last validation is `end`."""
    return [loss - losses[-1] + end for loss in losses]


def test_runs_that_miss_the_target_close_to_their_end_are_neither_the_same_nor_better() -> None:
    """At its end such a run looks as if it had needed no more than the other, or hardly more."""
    drawn = drawn_curves(np.random.default_rng(3), 8)
    late = {key: ending_at(losses, 4.97) for key, losses in drawn.items()}
    wide = curve_spec(
        "tokens_to_loss", verdict__primary={"metric": "tokens_to_loss", "target": "5 nats", "margin": "20%"}
    )
    assert judged(wide, late).measured is VerdictWord.SAME
    missed = judged(wide, {**late, (5, "baseline"): ending_at(late[5, "baseline"], 5.01)})
    assert (missed.measured, missed.cause) == (VerdictWord.INCONCLUSIVE, Cause.TARGET)
    early = late | {(block, "wider"): ending_at(late[block, "wider"], 4.4) for block in range(8)}
    assert judged(wide, early).measured is VerdictWord.BETTER
    missed = judged(wide, {**early, (5, "wider"): ending_at(late[5, "wider"], 5.01)})
    assert (missed.measured, missed.cause) == (VerdictWord.INCONCLUSIVE, Cause.TARGET)


def test_seconds_of_a_run_that_ended_before_the_other_reached_the_target_have_no_order() -> None:
    """The baseline never reaches it, but ended in half of the time that the variant takes to reach it."""
    curves = with_runs_that_miss("baseline", range(8), effect=0.4)
    speeds = {(b, "baseline"): 10_000.0 for b in range(8)}
    assert judged(curve_spec("seconds_to_loss"), curves, speeds=speeds).cause is Cause.TARGET
    assert (
        judged(curve_spec("seconds_to_loss"), with_runs_that_miss("baseline", range(8))).measured is VerdictWord.BETTER
    )


def test_a_target_that_is_reached_at_the_first_validation_has_no_number() -> None:
    curves = dict(drawn_curves(np.random.default_rng(4), 8))
    curves[2, "wider"] = [5.0, *curves[2, "wider"][1:]]
    variant = judged(curve_spec("tokens_to_loss"), curves)
    assert variant.cause is Cause.TARGET
    assert "1 of 16 trials are at or below 5 nats at their first validation" in variant.reason


@pytest.mark.parametrize(("seeds", "first"), [(8, True), (12, False)])
def test_a_better_number_of_a_curve_says_what_its_seeds_cannot_exclude(seeds: int, first: bool) -> None:
    curves = drawn_curves(np.random.default_rng(2), seeds, effect=-0.3)
    variant = judged(curve_spec("tokens_to_loss", seeds), curves)
    share = 100 * (1 - 0.05 ** (1 / seeds))
    line = f"{seeds} blocks do not exclude that up to {share:.0f} % of this arm's runs are far worse"
    assert variant.verdict is VerdictWord.BETTER
    assert (line in variant.reason) is first
    assert any(line in note for note in variant.notes) is not first


@pytest.mark.parametrize(
    ("arm", "blocks", "effect", "passed", "undecided"),
    [
        ("wider", (), -0.3, True, False),
        ("wider", (5,), -0.3, False, True),
        ("baseline", range(8), 0.0, True, False),
        ("wider", range(8), 0.0, False, False),
        ("baseline", (5,), 0.3, False, True),
    ],
)
def test_a_required_target_counts_missing_runs_at_their_end(
    arm: str, blocks: Sequence[int], effect: float, passed: bool, undecided: bool
) -> None:
    require = [{"metric": "tokens_to_loss", "target": "5 nats", "not_worse_by": "5%"}]
    spec = curve_spec(
        "tokens_to_loss", verdict__primary={"metric": "loss_val", "margin": "1%"}, verdict__require=require
    )
    (result,) = judged(spec, with_runs_that_miss(arm, blocks, effect)).requirements
    assert (result.passed, result.undecided) == (passed, undecided), result.detail
    assert ("reached 5 nats" in result.detail) is bool(blocks)


def test_validations_that_are_far_apart_widen_the_interval_and_say_so() -> None:
    """A steep curve of three points: no number of seeds shows where between two of them the target was reached."""
    steps = {"warmup": 1, "warmup_s": 0, "timed": TIMED, "val_rows": 2, "val_every": TIMED // 3}
    curves = {
        (b, arm): [7.0 + b / 100, 5.5, 4.0 + b / 100 - 0.02 * (arm == "wider")]
        for b in range(8)
        for arm in ("wider", "baseline")
    }
    curves = {key: [own[0], 4.6 + key[0] / 1000, own[2]] for key, own in curves.items()}
    variant = judged(curve_spec("tokens_to_loss", workload__steps=steps), curves)
    assert variant.verdict is VerdictWord.INCONCLUSIVE
    assert variant.primary is not None
    assert (variant.primary.bias_pct or 0) > 2
    assert variant.primary.ci_high_pct - variant.primary.ci_low_pct > 2 * 2
    assert any("validate more often" in note for note in variant.notes)
    assert variant.blocks_needed is None


def test_a_requirement_of_a_curve_is_proved_or_not_by_the_same_numbers() -> None:
    primary = {"metric": "loss_val", "margin": "1%"}
    require = [
        {"metric": "tokens_to_loss", "target": "5 nats", "not_worse_by": "10%"},
        {"metric": "loss_val_at_time", "not_worse_by": 0.2},
        {"metric": "seconds_to_loss", "target": "4.0 nats", "not_worse_by": "10%"},
    ]
    spec = curve_spec("tokens_to_loss", verdict__primary=primary, verdict__require=require)
    assert spec.verdict.timed
    curves = drawn_curves(np.random.default_rng(5), 8)
    met, timed, never = judged(spec, curves, CALIBRATED).requirements
    assert met.passed, met.detail
    assert met.rule == "worse by less than 10 %, to 5 nats"
    assert timed.passed, timed.detail
    assert never.undecided
    assert not never.passed
    assert "with 0 of 8 seeds" in never.detail
    uncalibrated = judged(spec, curves, UNCALIBRATED).requirements
    assert [one.passed for one in uncalibrated] == [True, False, False]
    worse = {key: [loss + 0.3 * (key[1] == "wider") for loss in own] for key, own in curves.items()}
    failed = judged(spec, worse, CALIBRATED).requirements
    assert [(one.passed, one.undecided) for one in failed[:2]] == [(False, False)] * 2


def test_an_arm_that_ignores_its_seed_gets_no_verdict() -> None:
    curves = dict(drawn_curves(np.random.default_rng(6), 8, effect=-0.3))
    for block in range(8):
        curves[block, "wider"] = curves[0, "wider"]
    assert judged(curve_spec("tokens_to_loss"), curves).cause is Cause.REPEATED_SEEDS


def test_pages_name_the_target_and_how_the_effect_is_estimated() -> None:
    spec = curve_spec("tokens_to_loss")
    assert rule_in_words(rule_of(spec)).startswith(
        "Token use to the target loss of 5 nats decides over 8 blocks, by t tests on the differences "
    )
    verdict = judge(
        make_plan(spec), spec, receipts_of(make_plan(spec), drawn_curves(np.random.default_rng(8), 8)), CALIBRATED
    )
    assert "Effect: variant / baseline, the geometric mean over the seeds." in lay_out(verdict).answers.note


@pytest.mark.parametrize(
    ("primary", "compared"),
    [
        ({"metric": "loss_val", "margin": "1%"}, True),
        (TO, True),
        ({**TO, "target": "1 nats"}, True),
        ({"metric": "tokens_per_s", "margin": "1%"}, False),
    ],
)
def test_losses_that_decide_are_compared(primary: dict[str, Any], compared: bool) -> None:
    """Also where a target is never reached."""
    variants = {"wider": {"overrides": {"learning_rate": 0.001}}}
    spec = curve_spec("tokens_to_loss", variants=variants, verdict__primary=primary)
    variant = judged(spec, drawn_curves(np.random.default_rng(9), 8))
    problem = confound(variant)
    assert problem is not None
    assert ("losses not compared" in problem) is not compared


def test_the_rule_has_the_target_and_says_how_curves_are_read() -> None:
    rule = rule_of(curve_spec("tokens_to_loss"))
    assert rule["primary"]["target"] == "5 nats"
    assert "linear between validations" in rule["comparison"]["curve"]
    assert "calibration" in rule["comparison"]
    assert rule["estimator"]["val_every"] == EVERY
    assert "calibration" not in rule_of(curve_spec("seconds_to_loss"))["comparison"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no schedule": ({"workload__steps": {"timed": 60, "val_rows": 2}}, "#/workload/steps/val_every", "gives 0"),
    "too few points": (
        {"workload__steps": {"timed": 60, "val_rows": 2, "val_every": 30}},
        "#/workload/steps/val_every",
        "at least 3 points",
    ),
    "an untrained loss": (
        {"verdict__primary": {**TO, "target": "8.5 nats"}},
        "#/verdict/primary/target",
        "not trained is already at 8.3",
    ),
    "a seed twice": ({"design__blocks": {"count": 16}}, "#/design/seeds", "a seed of its own"),
    "few seeds": ({"design__seeds": 5, "design__blocks": {"count": 6}}, "#/design/seeds", "at least 6; given: 5"),
    "other validation rows": (
        {"variants": {"words": {"overrides": {"vocab_size": 2048}}}},
        "#/verdict/primary/metric",
        "its validation rows are others",
    ),
    "other validation rows of a requirement": (
        {
            "variants": {"words": {"overrides": {"vocab_size": 2048}}},
            "verdict__primary": {"metric": "model_tflops_per_s", "margin": "1%"},
            "verdict__require": [{**TO, "margin": ..., "not_worse_by": "1%"}],
        },
        "#/verdict/require/0/metric",
        "its validation rows are others",
    ),
    "a required target": (
        {
            "verdict__primary": {"metric": "loss_val", "margin": "1%"},
            "verdict__require": [{**TO, "margin": ..., "not_worse_by": "1%", "target": "9 nats"}],
        },
        "#/verdict/require/0/target",
        "not trained",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_questions_that_no_trial_can_answer_are_refused(what: str) -> None:
    changes, where, message = REFUSED[what]
    required = changes.get("verdict__require", [])
    changes = {**changes, "verdict__require": [{k: v for k, v in one.items() if v is not ...} for one in required]}
    with pytest.raises(SpecError) as refused:
        make_plan(curve_spec("tokens_to_loss", **changes))
    assert {problem.pointer for problem in refused.value.problems} == {where}
    assert message in refused.value.problems[0].detail
