"""Trials that compiled and executed nothing, through plan, receipt and judge."""

from typing import Any

import pytest

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.metrics import CURVE_METRICS, LOSS_METRICS, METRICS, TARGET_METRICS
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import Decision, Outcome, VerdictWord
from ablate.experiments.records.circumstances import UNCALIBRATED
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.records.receipts import Receipt, read_metric, seal
from tests.factories import GIB, make_compiled, make_plan, make_spec

ROOMY = 16 * GIB


def compiled_spec(metric: str = "hbm_peak_gib", **changes: Any) -> AblationSpec:
    values = {
        "workload": {"recipe": "hybrid-ref-v6e"},
        "baseline": {"gates": {"attention": "flash"}},
        "variants": {"remat": {"gates": {"remat": True}}, "rows-32": {"gates": {"micro_batch": 32}}},
        "design": {"seeds": [1], "blocks": {"count": 2}},
        "placement": {"node_class": "tpu-v6e-compile"},
        "verdict": {"primary": {"metric": metric, "margin": "1%", "adopt_if": "5%"}},
        **changes,
    }
    return make_spec(**values)


def receipts_of(spec: AblationSpec, *, remat_bytes: int) -> list[Receipt]:
    plan = make_plan(spec)
    receipts = []
    for block in plan.blocks:
        for arm in block.order:
            needed = 50 * GIB if arm == "rows-32" else None
            peak = remat_bytes if arm == "remat" else ROOMY
            receipts.append(make_compiled(plan, block, arm, peak_bytes=peak, needed_bytes=needed))
    return receipts


def judged(remat_bytes: int) -> Verdict:
    spec = compiled_spec()
    return judge(make_plan(spec), spec, receipts_of(spec, remat_bytes=remat_bytes), UNCALIBRATED)


@pytest.mark.parametrize(
    ("remat_bytes", "verdict", "decision"),
    [
        (12 * GIB, VerdictWord.BETTER, Decision.ADOPT),
        (ROOMY - 1, VerdictWord.SAME, Decision.SAME),
        (18 * GIB, VerdictWord.WORSE, Decision.REJECT),
    ],
)
def test_planned_memory_decides_by_its_value_and_what_does_not_fit_is_an_answer(
    remat_bytes: int, verdict: VerdictWord, decision: Decision
) -> None:
    remat, rows = judged(remat_bytes).variants
    assert (remat.arm, remat.verdict, remat.decision) == ("remat", verdict, decision)
    assert (rows.arm, rows.verdict, rows.decision) == ("rows-32", VerdictWord.OOM, Decision.REJECT)


def test_repeats_that_differ_by_a_byte_are_not_exact() -> None:
    spec = compiled_spec()
    plan = make_plan(spec)
    receipts = receipts_of(spec, remat_bytes=12 * GIB)
    last = next(
        index for index, receipt in enumerate(receipts) if receipt.arm == "remat" and receipt.ids.block_index == 1
    )
    receipts[last] = make_compiled(plan, 1, "remat", peak_bytes=12 * GIB + 1)
    assert judge(plan, spec, receipts, UNCALIBRATED).variants[0].verdict is VerdictWord.INCONCLUSIVE


def test_a_compiled_receipt_is_whole_without_steps() -> None:
    plan = make_plan(compiled_spec())
    fits = make_compiled(plan, 0, "remat", peak_bytes=12 * GIB)
    too_big = make_compiled(plan, 0, "rows-32", peak_bytes=ROOMY, needed_bytes=50 * GIB)
    for receipt in (fits, too_big):
        assert verify(receipt.model_dump(mode="json")) == []
    assert (fits.outcome, too_big.outcome) == (Outcome.MEASURED, Outcome.OOM)
    assert read_metric(METRICS["hbm_peak_gib"], fits) == 12
    assert read_metric(METRICS["hbm_peak_gib"], too_big) is None
    assert "overflow" not in fits.model_dump(mode="json")["compilation"]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"custom_calls": 4}, "compilation.custom_calls is 4; the kernels give 3"),
        ({"hbm": None}, "compilation has neither a memory plan nor an overflow"),
    ],
)
def test_a_report_that_contradicts_itself_is_found(report: dict[str, Any], message: str) -> None:
    receipt = make_compiled(make_plan(compiled_spec()), 0, "remat", peak_bytes=12 * GIB, report=report)
    assert verify(receipt.model_dump(mode="json")) == [message]


def test_a_peak_that_is_not_the_sum_of_its_parts_is_found() -> None:
    receipt = make_compiled(make_plan(compiled_spec()), 0, "remat", peak_bytes=12 * GIB)
    assert receipt.compilation is not None
    assert receipt.compilation.hbm is not None
    smaller = receipt.compilation.hbm.model_copy(update={"peak_bytes": 11 * GIB})
    forged = receipt.model_copy(update={"compilation": receipt.compilation.model_copy(update={"hbm": smaller})})
    assert verify(seal(dict(forged)).model_dump(mode="json")) == [
        f"compilation.hbm.peak_bytes is {11 * GIB}; its parts give {12 * GIB}"
    ]


def test_steps_in_a_compiled_receipt_are_found() -> None:
    plan = make_plan(compiled_spec())
    receipt = make_compiled(plan, 0, "remat", peak_bytes=12 * GIB)
    times = {"seconds": 1.0, "began_s": 1.0, "ended_s": 2.0}
    step = {"index": 0, "phase": "timed", "tokens": 8, "loss": 1.0, "grad_norm": 1.0, **times}
    forged = seal({**dict(receipt), "steps": (step,)})
    assert "steps is present, but nothing was executed" in verify(forged.model_dump(mode="json"))


@pytest.mark.parametrize(
    "metric", [name for name, metric in METRICS.items() if metric.decides and metric.source == "training"]
)
def test_what_only_training_measures_cannot_decide_a_compilation(metric: str) -> None:
    primary = {"metric": metric, "margin": "0%" if metric in LOSS_METRICS else "1%"}
    primary |= {"target": "3 nats"} if metric in TARGET_METRICS else {}
    seeds = 6 if metric in CURVE_METRICS else 1
    spec = compiled_spec(verdict={"primary": primary}, design={"seeds": seeds, "blocks": {"count": 6}})
    with pytest.raises(SpecError) as caught:
        make_plan(spec)
    (problem,) = caught.value.problems
    assert problem.pointer == "#/verdict/primary/metric"
    assert problem.detail == (
        f"metric '{metric}' is not measured on node class 'tpu-v6e-compile': it compiles the step and executes "
        "nothing, so it has no speed, no loss and no memory in use"
    )
    assert problem.hint is not None
    assert "hbm_peak_gib" in problem.hint


def test_what_a_compiler_says_cannot_decide_where_training_runs() -> None:
    spec = make_spec(
        verdict={"primary": {"metric": "hbm_peak_gib", "margin": "1%"}}, design={"seeds": [1], "blocks": {"count": 2}}
    )
    with pytest.raises(SpecError, match="hbm_peak_gib") as caught:
        make_plan(spec)
    assert caught.value.problems[0].pointer == "#/verdict/primary/metric"


def test_a_required_loss_is_refused_where_nothing_is_executed() -> None:
    verdict = {
        "primary": {"metric": "hbm_peak_gib", "margin": "1%"},
        "require": [{"metric": "custom_calls", "max_value": 9}, {"metric": "loss_final", "max_delta": 0.1}],
    }
    with pytest.raises(SpecError) as caught:
        make_plan(compiled_spec(verdict=verdict))
    assert [problem.pointer for problem in caught.value.problems] == ["#/verdict/require/1/metric"]
