"""Compile time as the metric that decides: what its plan, guards, calibration and verdict are."""

import math

import numpy as np
import pytest

from ablate.experiments.analysis.guards import receipt_problems
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.noise.admission import admission_of, keep_ledger
from ablate.experiments.analysis.noise.calibrate import calibrations_of, key_of
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.rule import COMPILE_TIME, rule_of
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.records.calibration import Ledger
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.records.plan_file import make_plan_file
from tests.calibrations import aa_spec
from tests.factories import make_receipt, make_spec

COMPILED = {
    "baseline": {"gates": {"chunk_size": 16, "compile": True}},
    "variants": {"chunk-32": {"gates": {"chunk_size": 32}}},
    "verdict__primary": {"metric": "compile_s", "margin": "2%", "adopt_if": "5%"},
}
SPEC = make_spec(**COMPILED)
PLAN = make_plan(SPEC)


def receipts_of(plan, *, effect: float = 0.0, sd: float = 0.02, seed: int = 0, speed: float = 1.0):
    """Return receipts whose compilations take 20 s, that of variants `effect` (log) longer, with noise `sd`."""
    rng = np.random.default_rng(seed)
    receipts = []
    for block in plan.blocks:
        for name in block.order:
            longer = effect if name != "baseline" else 0.0
            compile_s = 20.0 * math.exp(longer + rng.normal(0, sd))
            made = make_receipt(plan, block, name, tokens_per_s=5000.0 * (1 if name == "baseline" else speed))
            steps = tuple(
                step.model_copy(update={"began_s": step.began_s + compile_s, "ended_s": step.ended_s + compile_s})
                for step in made.steps
            )
            receipts.append(
                make_receipt(
                    plan,
                    block,
                    name,
                    steps=steps,
                    compile_s=compile_s,
                    compile_cache_hit=False,
                    wall_s=60.0,
                )
            )
    return receipts


def judged(receipts, plan=PLAN, spec=SPEC, **admission):
    answer = admission_of(spec, receipts, admission.pop("known", ()), ledger=Ledger(), mended_by="ablate aa cpu")
    return judge(plan, spec, receipts, Circumstances(admission=answer)).variants[0]


def known(**options):
    aa = aa_spec(SPEC)
    return calibrations_of(make_plan(aa), aa, receipts_of(make_plan(aa), seed=9, **options))


def test_it_is_timed_cold_and_part_of_the_hashed_rule() -> None:
    assert (PLAN.timed, PLAN.cold_caches) == (True, True)
    assert rule_of(SPEC)["estimator"] == COMPILE_TIME
    claimed = make_plan_file(PLAN, spec_text="", content_type="application/yaml").plan
    assert claimed.model_dump(mode="json")["cold_caches"] is True
    other = make_plan(make_spec())
    assert not other.cold_caches
    assert "cold_caches" not in other.model_dump(mode="json")


def test_without_a_calibration_of_its_own_its_verdicts_are_capped() -> None:
    receipts = receipts_of(PLAN, effect=0.2)
    capped = judged(receipts)
    assert (capped.verdict, capped.measured) == (VerdictWord.INCONCLUSIVE, VerdictWord.WORSE)
    windows = make_spec(**{**COMPILED, "verdict__primary": {"metric": "tokens_per_s", "margin": "0.5%"}})
    aa = aa_spec(windows)
    throughput = calibrations_of(make_plan(aa), aa, receipts_of(make_plan(aa), seed=9))
    still = judged(receipts, known=throughput)
    assert still.verdict is VerdictWord.INCONCLUSIVE
    assert "another estimator or window" in still.reason
    assert judged(receipts, known=known()).verdict is VerdictWord.WORSE


@pytest.mark.parametrize(("effect", "verdict"), [(-0.2, VerdictWord.BETTER), (0.2, VerdictWord.WORSE)])
def test_less_is_better_and_the_window_stands_beside_it(effect: float, verdict: VerdictWord) -> None:
    variant = judged(receipts_of(PLAN, effect=effect, sd=0.01), known=known())
    assert variant.verdict is verdict
    assert variant.primary is not None
    assert variant.primary.metric == "compile_s"
    assert variant.primary.by_median_pct is None
    assert variant.primary.delta_pct == pytest.approx(100 * math.expm1(effect), abs=3)
    assert {one.metric for one in variant.secondary} == {"tokens_per_s", "step_s", "model_tflops_per_s"}


def test_elsewhere_it_is_not_compared() -> None:
    spec = make_spec(baseline=COMPILED["baseline"], variants=COMPILED["variants"])
    variant = judged(receipts_of(make_plan(spec)), make_plan(spec), spec)
    assert variant.primary is not None
    assert variant.primary.metric == "tokens_per_s"
    assert "compile_s" not in {one.metric for one in variant.secondary}


def test_its_calibration_measures_compile_time() -> None:
    (made,) = known()
    assert (made.metric, made.blocks) == ("compile_s", 20)
    assert made.sd_pct == pytest.approx(100 * 0.02 * math.sqrt(2), rel=0.5)
    assert keep_ledger([made]).ablations == 1
    assert made.key == key_of(SPEC, receipts_of(PLAN)[0])


def test_code_from_a_cache_spoils_a_trial_only_where_compile_time_decides() -> None:
    plain = make_plan(make_spec(baseline=COMPILED["baseline"], variants=COMPILED["variants"]))
    for plan, number in ((PLAN, 1), (plain, 0)):
        warm = make_receipt(plan, 0, "baseline", compile_cache_hit=True)
        problems = [one for one in receipt_problems(warm, plan) if "came from caches on disk" in one]
        assert len(problems) == number


@pytest.mark.parametrize("gates", [{"chunk_size": 16}, {"chunk_size": 16, "compile": False}])
def test_arms_that_compile_nothing_have_no_compile_time(gates) -> None:
    with pytest.raises(SpecError, match="compiles nothing before step 0") as caught:
        make_plan(make_spec(**{**COMPILED, "baseline": {"gates": gates}}))
    assert caught.value.problems[0].pointer == "#/verdict/primary/metric"
