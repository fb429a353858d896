"""Metrics that a spec declares decide by the same statistics as ours, and values without a ratio get a named cause."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ablate.experiments.analysis.declared import step_of
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.looks import at_look
from ablate.experiments.analysis.noise.admission import admission_of, is_enough, standing_problems
from ablate.experiments.analysis.noise.calibrate import aa_blocks_of, calibrations_of, seconds
from ablate.experiments.analysis.noise.history import BaselineRun, history_of
from ablate.experiments.analysis.proposals import outcome_of
from ablate.experiments.analysis.sizing import plan_spec, repeats_exactly, size_of
from ablate.experiments.analysis.statistics import dependence_of
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict, Verdict
from ablate.experiments.design.aa_spec import calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import Plan, make_plan
from ablate.experiments.design.power import ALPHA, FIRST_SHARE
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import canonical_json
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import Decision, Outcome, ProposalOutcome, VerdictWord
from ablate.experiments.records.calibration import Ledger
from ablate.experiments.records.circumstances import Admission, Circumstances
from ablate.experiments.records.program_report import EvaluationReport
from ablate.experiments.records.receipt_check import contradictions
from ablate.experiments.records.receipts import Receipt, seal
from ablate.experiments.reporting import sentences, wording
from ablate.experiments.reporting.pages.circumstance_tables import calibrations_table
from ablate.experiments.reporting.verdict_layout import lay_out, short_answer
from tests.program_receipts import plan_of, program_receipt, program_receipts, program_spec, program_values

ADMITTED = Circumstances(admission=Admission(refused_because=None))
LEVEL = FIRST_SHARE * ALPHA


def drawn(plan: Plan, rng: np.random.Generator, *, effect: float, sd: float, size: float = 1.0) -> dict[Any, Any]:
    """Draw a value for each trial: a seed's own level, and noise of `sd`; the variant is exp(effect) times larger."""
    return {
        (block.index, arm): {
            "val_bpb": size * math.exp(rng.normal(0, sd) + 0.3 * block.seed + (effect if arm == "fused" else 0))
        }
        for block in plan.blocks
        for arm in block.order
    }


def judged(spec: AblationSpec, plan: Plan, values: Any, circumstances: Circumstances = ADMITTED) -> Verdict:
    return judge(plan, spec, program_receipts(plan, values), circumstances)


def only(verdict: Verdict) -> VariantVerdict:
    (variant,) = verdict.variants
    return variant


def oracle(plan: Plan, values: Any) -> tuple[float, float, float]:
    """Return mean, standard error and degrees of freedom of d by the normal equations."""
    d = [math.log(values[b.index, "fused"]["val_bpb"] / values[b.index, "baseline"]["val_bpb"]) for b in plan.blocks]
    places = [b.order.index("fused") - b.order.index("baseline") for b in plan.blocks]
    design = np.column_stack([np.ones(len(d)), places])
    coefficients, *_ = np.linalg.lstsq(design, np.array(d), rcond=None)
    residual = np.array(d) - design @ coefficients
    freedom = len(d) - 2
    se = math.sqrt(residual @ residual / freedom * np.linalg.inv(design.T @ design)[0, 0])
    return float(coefficients[0]), se, freedom


@pytest.mark.parametrize("better", ["lower", "higher"])
@pytest.mark.parametrize("seed", range(60))
def test_a_declared_metric_is_judged_like_the_oracle(seed: int, better: str) -> None:
    rng = np.random.default_rng(seed)
    blocks, margin = int(rng.integers(6, 24)), float(rng.choice([0.1, 0.5, 2.0, 20.0]))
    spec, plan = plan_of(
        workload__metrics={"val_bpb": {"better": better}},
        design__seeds=[*range(blocks)],
        design__blocks={"count": blocks},
        verdict__primary={"metric": "val_bpb", "margin": f"{margin}%", "adopt_if": f"{2 * margin}%"},
        verdict__require=[{"metric": "val_bpb", "not_worse_by": f"{margin}%"}],
    )
    effect, sd = float(rng.normal(0, 2 * margin / 100)), float(10 ** rng.uniform(-5, -1))
    values = drawn(plan, rng, effect=effect, sd=sd, size=float(10 ** rng.uniform(-9, 9)))
    variant = only(judged(spec, plan, values))
    mean, se, freedom = oracle(plan, values)
    low, high = math.log1p(-margin / 100), math.log1p(margin / 100)
    p_differs = 2 * stats.t.sf(abs(mean / se), freedom)
    p_same = max(stats.t.sf((mean - low) / se, freedom), stats.t.sf((high - mean) / se, freedom))
    primary = variant.primary
    assert primary is not None
    assert primary.delta_pct == pytest.approx(100 * math.expm1(mean), rel=1e-7, abs=1e-9)
    assert (primary.p_holm, primary.p_same) == pytest.approx((p_differs, p_same), rel=1e-6, abs=1e-12)
    gain = 100 * math.expm1(mean) * (1 if better == "higher" else -1)
    word = VerdictWord.INCONCLUSIVE
    reach = stats.t.ppf(1 - LEVEL / 2, freedom) * se
    if mean - reach > high or mean + reach < low:
        word = VerdictWord.BETTER if gain > 0 else VerdictWord.WORSE
    elif p_same <= LEVEL:
        word = VerdictWord.SAME
    assert variant.measured is word
    p_met = stats.t.sf((mean - low) / se, freedom) if better == "higher" else stats.t.sf((high - mean) / se, freedom)
    (required,) = variant.requirements
    assert required.passed is bool(p_met <= LEVEL)
    if required.undecided:
        assert variant.decision is not Decision.ADOPT
    if variant.verdict is VerdictWord.BETTER and required.passed:
        assert variant.decision is (Decision.ADOPT if gain >= 2 * margin else Decision.REJECT)
    if variant.verdict is VerdictWord.WORSE:
        assert variant.decision is Decision.REJECT


@pytest.mark.parametrize(
    ("own", "base"),
    [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (-1.0, 1.0), (1.0, -1.0), (-1.0, -2.0), (-1e-300, 1e300)],
)
@pytest.mark.parametrize("required", [False, True])
def test_values_without_a_ratio_get_a_named_cause(own: float, base: float, required: bool) -> None:
    primary = {"metric": "process_s" if required else "val_bpb", "margin": "0.5%"}
    spec, plan = plan_of(
        verdict__primary=primary, verdict__require=[{"metric": "val_bpb", "not_worse_by": "1%"}] if required else []
    )
    values = drawn(plan, np.random.default_rng(0), effect=0, sd=0.01)
    values[3, "fused"], values[3, "baseline"] = {"val_bpb": own}, {"val_bpb": base}
    receipts = program_receipts(plan, values, process_s=2.0)
    verdict = judge(plan, spec, receipts, ADMITTED)
    variant = only(verdict)
    if required:
        (result,) = variant.requirements
        assert (result.passed, result.undecided) == (False, True)
        assert "block 4" in result.detail
        return
    assert (variant.verdict, variant.cause) == (VerdictWord.INCONCLUSIVE, Cause.NO_RATIO)
    assert variant.decision is Decision.INCONCLUSIVE
    assert "block 4, arm " in variant.reason
    assert sentences.sentence(verdict, variant).startswith("Not decided: no ratio: block 4")
    assert lay_out(verdict).variants[0].why == ""


HOSTILE = [0.0, -0.0, 5e-324, 1e-308, 1e-99, 1e-30, 0.5, 1.0, 1e30, 1e99, 1.7e308, -1.0, -1.7e308]


@pytest.mark.parametrize("seed", range(60))
def test_no_reported_number_stops_judge_pages_calibration_or_history(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec, plan = plan_of(verdict__require=[{"metric": "val_bpb", "not_worse_by": "1%"}])
    pool = rng.choice(HOSTILE, 3) if seed % 2 else [1e-3, 1.0, 1e2]
    values = {(b.index, arm): {"val_bpb": float(rng.choice(pool))} for b in plan.blocks for arm in b.order}
    verdict = judged(spec, plan, values)
    variant = only(verdict)
    assert lay_out(verdict).tables
    verdict.model_dump_json()
    canonical_json(verdict.model_dump(mode="json"))
    pairs = [(values[i, "fused"]["val_bpb"], values[i, "baseline"]["val_bpb"]) for i in range(6)]
    usable = all(own > 0 and base > 0 and 1e-6 < own / base < 1e6 for own, base in pairs)
    assert (variant.cause is Cause.NO_RATIO) is not usable
    aa, aa_plan = aa_of(spec)
    noise = {(b.index, arm): {"val_bpb": float(rng.choice(pool))} for b in aa_plan.blocks for arm in b.order}
    receipts = program_receipts(aa_plan, noise)
    for calibration in calibrations_of(aa_plan, aa, receipts):
        canonical_json(calibration.model_dump(mode="json"))
        list(standing_problems(calibration, seconds(calibration.measured_at)))
    runs = [BaselineRun(ablation=f"abl_{n}", name="run", receipts=(one,)) for n, one in enumerate(receipts)]
    for series in history_of("val_bpb", runs):
        canonical_json(series.model_dump(mode="json"))


@pytest.mark.parametrize("seed", range(60))
def test_a_number_that_is_missing_in_any_trial_is_never_kept_and_never_passes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    required = {
        "verdict__primary": {"metric": "tokens_per_s", "margin": "0.5%"},
        "verdict__require": [{"metric": "val_bpb", "not_worse_by": "50%"}],
    }
    spec, plan = plan_of(**(required if seed % 2 else {}))
    values = drawn(plan, rng, effect=-0.2, sd=0.001)
    bad = {list(values)[place] for place in rng.choice(len(values), size=rng.integers(1, 4), replace=False)}
    nothing: dict[str, Any] = {"reported": {}}
    failed = {"outcome": Outcome.FAILED, "message": "the program reported nan as 'val_bpb'"}

    def verdict_with(bad: set[Any]) -> Verdict:
        receipts = [
            program_receipt(
                plan,
                block,
                arm,
                step_s=0.02 if arm == "baseline" else 0.016,
                **{
                    "reported": values[block.index, arm],
                    **(nothing if (block.index, arm) in bad else {}),
                    **(failed if (block.index, arm) in bad and rng.random() < 0.5 else {}),
                },
            )
            for block in plan.blocks
            for arm in block.order
        ]
        return judge(plan, spec, receipts, ADMITTED)

    assert outcome_of(verdict_with(set())) is ProposalOutcome.KEEP
    verdict = verdict_with(bad)
    assert only(verdict).decision is not Decision.ADOPT
    assert outcome_of(verdict) is not ProposalOutcome.KEEP
    assert not any(result.passed for result in only(verdict).requirements)


def test_a_receipt_without_a_declared_number_contradicts_its_configuration() -> None:
    _spec, plan = plan_of()
    receipt = program_receipt(plan, plan.blocks[0], "fused", reported={"other": 1.0})
    assert "the program did not report 'val_bpb'" in contradictions(receipt)


def test_a_number_that_ignores_the_seed_proves_nothing() -> None:
    spec, plan = plan_of()
    values = {(b.index, arm): {"val_bpb": 1.5 if arm == "fused" else 1.6} for b in plan.blocks for arm in b.order}
    variant = only(judged(spec, plan, values))
    assert (variant.verdict, variant.measured, variant.cause) == (
        VerdictWord.INCONCLUSIVE,
        VerdictWord.BETTER,
        Cause.REPEATED_SEEDS,
    )
    same = {place: {"val_bpb": 1.5} for place in values}
    assert only(judged(spec, plan, same)).verdict is VerdictWord.SAME
    drifting = {(index, arm): {"val_bpb": 1.5 + math.sqrt(index) / 100} for index, arm in values}
    assert only(judged(spec, plan, drifting)).verdict is VerdictWord.SAME


def test_the_luck_of_seeds_that_arms_share_hides_no_clear_effect() -> None:
    spec, plan = plan_of()
    rng = np.random.default_rng(0)
    level = {block.index: 1.0 + 0.05 * block.seed for block in plan.blocks}

    def lower_by(change: float, noise: float) -> VariantVerdict:
        values = {
            (index, arm): {"val_bpb": level[index] - (change if arm == "fused" else 0) + noise * rng.random()}
            for index in level
            for arm in ("baseline", "fused")
        }
        return only(judged(spec, plan, values))

    assert lower_by(0.1, 0.001).verdict is VerdictWord.BETTER
    loud = {(i, arm): {"val_bpb": 1.2 + (0.08 * (i % 2) if arm == "fused" else 0.001 * (i % 3))} for i, arm in (
        (index, arm) for index in level for arm in ("baseline", "fused"))}  # fmt: skip
    assert only(judged(spec, plan, loud)).measured is not VerdictWord.BETTER


def test_other_declared_metrics_are_compared_for_information_if_no_seed_repeats() -> None:
    metrics = {"val_bpb": {"better": "lower"}, "accuracy": {"better": "higher"}}
    spec, plan = plan_of(workload__metrics=metrics)
    rng = np.random.default_rng(1)
    values = drawn(plan, rng, effect=-0.05, sd=0.001)
    values = {place: {**own, "accuracy": 0.5 + 0.01 * rng.random()} for place, own in values.items()}
    verdict = judged(spec, plan, values)
    variant = only(verdict)
    assert variant.verdict is VerdictWord.BETTER
    assert {one.metric: one.better for one in variant.secondary} == {
        "accuracy": "higher",
        "tokens_per_s": None,
        "step_s": None,
    }
    layout = lay_out(verdict)
    assert layout.rule.adopt_from_pct == -1.5
    assert "val_bpb" in layout.variants[0].sentence
    repeated = {"metric": "tokens_per_s", "margin": "0.5%"}
    spec, plan = plan_of(workload__metrics=metrics, design__seeds=[1, 2], verdict__primary=repeated)
    assert [one.metric for one in only(judged(spec, plan, values)).secondary] == ["step_s"]


def test_a_requirement_without_proof_keeps_an_ablation_running_until_its_last_look() -> None:
    changes: dict[str, Any] = {
        "design__seeds": [*range(20)],
        "design__blocks": {"looks": [6, 12, 20]},
        "verdict__primary": {"metric": "step_s", "margin": "1%"},
        "verdict__require": [{"metric": "val_bpb", "not_worse_by": "0.5%"}],
    }
    spec, plan = plan_of(**changes)
    rng = np.random.default_rng(5)
    values = drawn(plan, rng, effect=0.0, sd=0.01)

    def receipts() -> Any:
        noise = np.random.default_rng(2)
        for one in program_receipts(plan, values):
            factor = (0.9 if one.arm == "fused" else 1.0) * math.exp(noise.normal(0, 0.001))
            steps = tuple(step.model_copy(update={"seconds": step.seconds * factor}) for step in one.steps)
            from ablate.experiments.records.receipts import summarise

            summary = summarise(steps, flops_per_step=0, loss_val=None, peak_flops=None)
            yield one.model_copy(update={"steps": steps, "summary": summary})

    every = list(receipts())
    early = judge(plan, spec, [one for one in every if one.ids.block_index < 6], ADMITTED)
    assert only(early).measured is VerdictWord.BETTER
    assert only(early).requirements[0].undecided
    assert at_look(plan, spec, every, ADMITTED, 0).go_on
    assert not at_look(plan, spec, every, ADMITTED, 2).go_on


def aa_of(spec: AblationSpec) -> tuple[AblationSpec, Plan]:
    text = calibration_spec(spec, node_class="cpu", blocks=20, order_seed=3)
    calibration = parse_spec(text, "application/yaml")
    return calibration, make_plan(calibration)


@pytest.mark.parametrize("sd", [0.0, 0.004])
def test_the_noise_of_a_declared_metric_is_its_own(sd: float) -> None:
    spec, plan = plan_of()
    aa, aa_plan = aa_of(spec)
    rng = np.random.default_rng(3)
    values = {
        (block.index, arm): {"val_bpb": 1.2 + 0.1 * block.seed + rng.normal(0, sd)}
        for block in aa_plan.blocks
        for arm in block.order
    }
    (calibration,) = calibrations_of(aa_plan, aa, program_receipts(aa_plan, values))
    assert (calibration.metric, calibration.key.metric, calibration.blocks) == ("val_bpb", "val_bpb", 20)
    assert list(standing_problems(calibration, seconds(calibration.measured_at))) == []
    receipts = program_receipts(plan, drawn(plan, np.random.default_rng(1), effect=-0.1, sd=0.001))
    admission = admission_of(spec, receipts, [calibration], ledger=Ledger(), mended_by="")
    assert admission.refused_because is None
    assert judge(plan, spec, receipts, Circumstances(admission=admission)).variants[0].verdict is VerdictWord.BETTER
    assert (size_of(spec, plan, [calibration]) is None) is (sd == 0), "one seed shows no spread over seeds"
    other = program_spec(workload__metrics={"accuracy": {"better": "higher"}}, verdict__primary__metric="accuracy")
    reason = admission_of(other, receipts, [calibration], ledger=Ledger(), mended_by="").refused_because
    assert reason is not None


@pytest.mark.parametrize("blocks", [6, 20])
def test_a_metric_that_repeats_bit_for_bit_needs_no_more_aa_blocks_and_widens_nothing(blocks: int) -> None:
    spec, plan = plan_of()
    aa = parse_spec(calibration_spec(spec, node_class="cpu", blocks=blocks, order_seed=3), "application/yaml")
    aa_plan = make_plan(aa)
    values = {(one.index, arm): {"val_bpb": 1.2 + 0.1 * one.seed} for one in aa_plan.blocks for arm in one.order}
    (calibration,) = calibrations_of(aa_plan, aa, program_receipts(aa_plan, values))
    now = seconds(calibration.measured_at)
    assert (calibration.bit_repeatable, is_enough(calibration, now)) == (True, True)
    assert (calibration.sd_pct, calibration.drift_pct_per_hour, dependence_of([calibration])) == (0, 0, ())
    assert repeats_exactly(spec, plan, [calibration])
    assert size_of(spec, plan, [calibration]) is None
    circumstances = Circumstances(admission=Admission(calibrations=(calibration,), refused_because=None))
    variant = only(judged(spec, plan, drawn(plan, np.random.default_rng(1), effect=-0.1, sd=0.001), circumstances))
    assert variant.primary is not None
    assert variant.primary.widened == 1.0
    assert not any("wider" in note for note in variant.notes)
    table = calibrations_table(circumstances)
    assert {row[0].text: row[1].text for row in table.rows}["drift"] == wording.NOTHING
    body = canonical_json(program_values(design__blocks="auto")).encode()
    auto = parse_spec(body, "application/json")
    with pytest.raises(SpecError, match="not how 'val_bpb' differs between seeds"):
        plan_spec(body, "application/json", auto, lambda: [calibration])


def test_noise_of_a_declared_metric_has_no_drift_of_its_seeds() -> None:
    spec, _plan = plan_of()
    aa, aa_plan = aa_of(spec)
    rng = np.random.default_rng(3)
    values = {
        (one.index, arm): {"val_bpb": 1.2 + one.seed + rng.normal(0, 0.01)}
        for one in aa_plan.blocks
        for arm in one.order
    }
    (calibration,) = calibrations_of(aa_plan, aa, program_receipts(aa_plan, values))
    assert (calibration.bit_repeatable, calibration.drift_pct_per_hour) == (False, 0)


def test_a_printed_number_that_contradicts_the_counted_one_is_named() -> None:
    spec, plan = plan_of()
    values = drawn(plan, np.random.default_rng(1), effect=-0.1, sd=0.001)
    receipts = []
    for receipt in program_receipts(plan, values):
        assert receipt.program is not None
        lies = receipt.arm == "fused" and receipt.ids.block_index in (2, 4)
        program = receipt.program.model_copy(update={"contradicted": {"val_bpb": 0.001} if lies else {}})
        receipts.append(seal({**receipt.model_dump(), "program": program}))
    verdict = judge(plan, spec, receipts, ADMITTED)
    (text,) = only(verdict).contradictions
    counted = values[2, "fused"]["val_bpb"]
    numbers = f"it printed or reported 0.001 as val_bpb, but {counted:.6g} counts (block 3; so in 2 of its 6 trials)"
    assert text == f"arm 'fused' contradicts itself: {numbers}"
    assert lay_out(verdict).caveat.startswith(text)
    assert text in lay_out(verdict).variants[0].remarks
    assert only(judge(plan, spec, program_receipts(plan, values), ADMITTED)).contradictions == ()


EVALUATION = {"workload__code": "/srv/lab", "workload__evaluate": ["python", "judge.py"]}


def evaluated(plan: Plan, values: Any, **changes: Any) -> list[Receipt]:
    """Return receipts of trials whose `val_bpb` an evaluation measured; `changes` are those of its report."""
    receipts = []
    for receipt in program_receipts(plan, values):
        assert receipt.program is not None
        fields = {
            "argv": ("python", "judge.py"),
            "code": "sha256:j",
            "metrics": ("val_bpb",),
            "exit_code": 0,
            **changes,
        }
        lies = {"val_bpb": 0.5} if receipt.arm == "fused" else {}
        update = {"evaluation": EvaluationReport.model_validate(fields), "contradicted": lies}
        receipts.append(seal({**receipt.model_dump(), "program": receipt.program.model_copy(update=update)}))
    return receipts


def test_a_number_of_an_evaluation_says_so_and_names_the_programs_own() -> None:
    spec, plan = plan_of(**EVALUATION)
    values = drawn(plan, np.random.default_rng(1), effect=-0.1, sd=0.001)
    receipts = evaluated(plan, values)
    assert [problem for one in receipts for problem in contradictions(one)] == []
    variant = only(judge(plan, spec, receipts, ADMITTED))
    note = "used its arguments, variables and code; val_bpb by the protected evaluation `python judge.py`"
    assert any(note in one for one in variant.notes), variant.notes
    counted = values[0, "fused"]["val_bpb"]
    trials = "(block 1; so in 6 of its 6 trials)"
    assert variant.contradictions == (
        f"arm 'fused' reported 0.5 as val_bpb, but {counted:.6g} counts, by the protected evaluation {trials}",
    )
    verdict = judge(plan, spec, receipts, ADMITTED)
    assert lay_out(verdict).caveat.startswith(variant.contradictions[0])
    other = "; a program reported another number than counts"
    assert short_answer(verdict).endswith(other), "in the line of a proposal"
    assert other not in short_answer(judge(plan, spec, program_receipts(plan, values), ADMITTED))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": ()}, "the evaluation did not measure 'val_bpb'"),
        ({"metrics": ("val_bpb", "more")}, "the evaluation's 'more' is missing"),
        ({"argv": ("python", "kind.py")}, "program.evaluation.argv is ['python', 'kind.py']"),
    ],
)
def test_a_receipt_whose_evaluation_is_not_that_of_its_configuration_contradicts_itself(
    changes: dict[str, Any], words: str
) -> None:
    _spec, plan = plan_of(**EVALUATION)
    values = drawn(plan, np.random.default_rng(1), effect=0, sd=0.001)
    problems = contradictions(evaluated(plan, values, **changes)[0])
    assert any(words in problem for problem in problems), problems


def test_a_receipt_has_an_evaluation_exactly_if_its_configuration_has_one() -> None:
    values = {}
    for changes in (EVALUATION, {"workload__code": "/srv/lab"}):
        _spec, plan = plan_of(**changes)
        values = drawn(plan, np.random.default_rng(1), effect=0, sd=0.001)
        receipts = program_receipts(plan, values) if "workload__evaluate" in changes else evaluated(plan, values)
        assert any("program.evaluation is" in problem for problem in contradictions(receipts[0]))


def test_an_evaluation_whose_code_changes_between_blocks_compares_nothing() -> None:
    spec, plan = plan_of(**EVALUATION)
    values = drawn(plan, np.random.default_rng(1), effect=-0.1, sd=0.001)
    receipts, other = evaluated(plan, values), evaluated(plan, values, code="sha256:k")
    mixed = [*receipts[:6], *other[6:]]
    variant = only(judge(plan, spec, mixed, ADMITTED))
    assert variant.decision is Decision.INVALID
    assert "code of the evaluation of block 1 and block 4 differ" in variant.reason


def test_aa_blocks_without_a_ratio_are_left_out() -> None:
    spec, _ = plan_of()
    aa, plan = aa_of(spec)
    values = {(b.index, arm): {"val_bpb": -1.0 if b.index % 2 else 1.0} for b in plan.blocks for arm in b.order}
    assert len(list(aa_blocks_of(plan, aa, program_receipts(plan, values)))) == 10


def test_the_history_of_a_declared_metric_knows_its_direction() -> None:
    for better, worse in (("lower", True), ("higher", False)):
        _, plan = plan_of(workload__metrics={"val_bpb": {"better": better}})
        rng = np.random.default_rng(4)
        runs = []
        for number in range(16):
            level = 1.0 if number < 8 else 1.3
            values = {(b.index, a): {"val_bpb": level + rng.normal(0, 0.001)} for b in plan.blocks for a in b.order}
            own = [one for one in program_receipts(plan, values) if one.arm == "baseline"]
            runs.append(BaselineRun(ablation=f"abl_{number:02}", name="run", receipts=tuple(own)))
        (series,) = history_of("val_bpb", runs)
        assert [change.worse for change in series.changes] == [worse]
    assert history_of("nothing", runs) == []


def test_receipts_of_the_factory_are_genuine() -> None:
    _, plan = plan_of()
    values = drawn(plan, np.random.default_rng(0), effect=0, sd=0.01)
    assert [problem for one in program_receipts(plan, values) for problem in contradictions(one)] == []


@given(st.sampled_from([0.02, 0.001, 1 / 64]), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_a_metric_in_steps_is_never_the_same_within_less_than_a_step(step: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    margin = float(rng.choice([0.4, 2.5])) * step
    spec, plan = plan_of(
        workload__metrics={"val_bpb": {"better": "lower"}},
        design__seeds=[*range(12)],
        design__blocks={"count": 12},
        verdict__primary={"metric": "val_bpb", "margin": f"{100 * margin / 0.9:.2f}%"},
        verdict__require=[],
    )
    shared = {block.index: rng.normal(0, step / 3) for block in plan.blocks}
    shared[0], shared[1] = step, 0.0
    values = {
        (b.index, arm): {"val_bpb": step * round((0.9 + shared[b.index]) / step)}
        for b in plan.blocks
        for arm in b.order
    }
    variant = only(judged(spec, plan, values))
    coarse = margin < step
    assert (variant.verdict is VerdictWord.SAME) is not coarse
    assert (variant.cause is Cause.COARSE) is coarse


def test_steps_are_told_from_numbers_that_only_differ() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = rng.normal(2, 0.1, 12)
        assert (step_of([*values, *values]) or 0) < 1e-4
        grid = float(rng.choice([0.02, 0.125, 1e-3]))
        rounded = np.round(values / grid) * grid
        gaps = np.unique(np.round(np.diff(np.unique(rounded)) / grid).astype(int))
        step = step_of([*rounded, rounded[0]])
        assert step == pytest.approx(grid * math.gcd(*gaps.tolist()))
    assert step_of([0.9, 0.92]) is None, "two numbers always have a gap"
    assert step_of([0.9, 0.92, 0.9]) == pytest.approx(0.02)
    assert step_of([0.9, 0.9]) is None
