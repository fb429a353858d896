"""Which trials an arm's numbers are taken over, and that every reader of them gets the same."""

import dataclasses
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ablate.experiments.analysis.arm_summary import largest_micro_batch, summarise_arm
from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.verdicts import ArmSummary, Verdict
from ablate.experiments.design.plan import BlockPlan
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.circumstances import CALIBRATED, UNCALIBRATED
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pages import evidence_tables
from ablate.experiments.reporting.pictures import memory
from ablate.experiments.reporting.terminal.markdown import verdict_markdown
from ablate.experiments.reporting.verdict_layout import lay_out
from ablate.experiments.reporting.view import AblationView
from tests import views
from tests.factories import GIB, make_plan, make_receipt, make_receipts, make_spec

PLAN = make_plan()
MEANS = ("tokens_per_s", "step_s", "model_tflops_per_s", "loss_step1", "loss_final", "loss_val", "compile_s")


def baseline(**swap: Any) -> list[Receipt]:
    """Return the baseline's receipts, the one of the third block made again with `swap`."""
    return [make_receipt(PLAN, block, "baseline", **(swap if block.index == 2 else {})) for block in PLAN.blocks]


def test_means_are_taken_over_all_measured_trials() -> None:
    receipts = make_receipts(PLAN, sd=0.05)
    own = [r for r in receipts if r.arm == "baseline"]
    rates = [r.summary.tokens_per_s for r in own if r.summary is not None]
    summary = summarise_arm(own)
    assert summary.tokens_per_s == pytest.approx(math.fsum(rates) / 6, rel=1e-12)
    assert summary.outcomes == {"measured": 6}


@pytest.mark.parametrize(
    ("swap", "lost"),
    [
        ({"loss_val": None}, {"loss_val"}),
        ({"summary": None}, {"tokens_per_s", "step_s", "model_tflops_per_s", "loss_step1", "loss_final", "loss_val"}),
    ],
)
def test_a_value_that_a_measured_trial_lacks_has_no_mean(swap: dict[str, Any], lost: set[str]) -> None:
    summary = summarise_arm(baseline(**swap))
    assert {name for name in MEANS if getattr(summary, name) is None} == lost


def test_trials_that_ran_out_of_memory_enter_no_mean_and_the_peaks() -> None:
    whole = summarise_arm(baseline())
    broken = summarise_arm(baseline(outcome="oom", message="no memory", compile_s=600.0, peak_bytes=9 * GIB))
    assert broken.outcomes == {"measured": 5, "oom": 1}
    assert broken.compile_s == whole.compile_s == 0.0
    assert broken.loss_val == whole.loss_val
    assert (broken.peak_reserved_bytes, whole.peak_reserved_bytes) == (9 * GIB, GIB)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.MEASURED])
def test_of_an_arm_without_a_measured_trial_only_running_out_of_memory_has_a_peak(outcome: Outcome) -> None:
    summary = summarise_arm([make_receipt(PLAN, 0, "baseline", outcome=outcome, message="it broke")])
    assert {getattr(summary, name) for name in MEANS} == {None}
    peak = GIB if outcome is Outcome.OOM else None
    assert (summary.peak_allocated_bytes is None, summary.peak_reserved_bytes) == (peak is None, peak)
    assert summarise_arm([]).outcomes == {}


def lacking(field: str) -> Callable[[Receipt], Receipt]:
    def change(receipt: Receipt) -> Receipt:
        summary = receipt.summary
        changes = dict.fromkeys(("mfu", "document_mfu") if field == "utilisation" else (field,))
        return receipt.model_copy(update={"summary": summary and summary.model_copy(update=changes)})

    return change


def with_first_trial_changed(view: AblationView, arm: str, change: Callable[[Receipt], Receipt]) -> AblationView:
    """Change the arm's receipt in the first block, and judge again."""
    trials = tuple(
        dataclasses.replace(t, receipt=change(t.receipt)) if t.receipt and (t.arm, t.block_index) == (arm, 0) else t
        for t in view.trials
    )
    changed = dataclasses.replace(view, trials=trials)
    spec = views.spec_of(view)
    return dataclasses.replace(changed, verdict=judge(view.plan, spec, changed.receipts, UNCALIBRATED))


@pytest.mark.parametrize("field", ["loss_val", "tokens_per_s", "utilisation"])
def test_verdict_tables_and_view_leave_out_the_same_mean(field: str) -> None:
    view = with_first_trial_changed(views.cpu_view(), "psiv-on", lacking(field))
    assert view.verdict is not None
    assert view.verdict.arms == view.arms
    assert getattr(view.arms["psiv-on"], field) is None
    if field == "loss_val":
        shown = {str(row[0]): [str(cell) for cell in row[1:]] for row in evidence_tables.arms_table(view).rows}
        assert shown["validation loss, nats"] == [f"{view.arms['baseline'].loss_val:.4f}", wording.NOTHING]


@pytest.mark.parametrize("seed", range(12))
def test_no_page_shows_a_utilisation_above_100_percent(seed: int) -> None:
    """Packed rows have whole-row FLOPs far above what they compute; a program may state any number."""
    draw = random.Random(seed)  # noqa: S311  # not for secrets
    whole, useful = draw.uniform(0, 3), draw.choice((None, draw.uniform(0, 1), 1.0))

    def packed(receipt: Receipt) -> Receipt:
        shares = {"mfu": whole, "document_mfu": useful}
        return receipt.model_copy(update={"summary": receipt.summary and receipt.summary.model_copy(update=shares)})

    view = views.cpu_view()
    changed = tuple(dataclasses.replace(t, receipt=t.receipt and packed(t.receipt)) for t in view.trials)
    shown = {
        str(row[0]): str(row[1]) for row in evidence_tables.arms_table(dataclasses.replace(view, trials=changed)).rows
    }
    share = whole if useful is None else useful
    text = shown["utilisation by useful FLOPs"]
    assert text.startswith("more than the device can do") if share > 1 else text == wording.plain_percent(100 * share)


def test_compile_time_of_the_table_is_that_of_measured_trials() -> None:
    def slow_failure(receipt: Receipt) -> Receipt:
        return receipt.model_copy(update={"outcome": Outcome.FAILED, "summary": None, "compile_s": 4000.0})

    view = with_first_trial_changed(views.cpu_view(), "psiv-on", slow_failure)
    shown = {str(row[0]): [str(cell) for cell in row[1:]] for row in evidence_tables.arms_table(view).rows}
    assert shown["compile time"] == ["4.10\N{NO-BREAK SPACE}s"] * 2


def test_rates_and_compile_times_that_no_trial_has_are_left_out() -> None:
    """A program that reports no tokens has a throughput of 0."""
    view = views.cpu_view()
    arms = {
        name: arm.model_copy(update={"tokens_per_s": 0.0, "compile_s": 0.0, "by_node": None})
        for name, arm in view.arms.items()
    }
    table = evidence_tables.arms_table(cast("Any", SimpleNamespace(**_parts(view), arms=arms)))
    headings = {str(row[0]) for row in table.rows}
    assert "step time" in headings
    assert headings.isdisjoint({"throughput, tokens/s", "compile time"})


def _parts(view: AblationView) -> dict[str, Any]:
    return {name: getattr(view, name) for name in ("plan", "whole_blocks", "verdict", "with_loss_unit")}


def test_memory_picture_shows_the_peaks_of_the_summary() -> None:
    view = views.view()
    picture = memory.memory(view)
    assert picture is not None
    peaks = [(arm.peak_allocated_bytes, arm.peak_reserved_bytes) for arm in view.arms.values()]
    assert (None, None) in peaks, "one arm neither measured nor ran out of memory"
    for allocated, reserved in peaks:
        if allocated is None or reserved is None:
            continue
        assert f"{allocated / GIB:.1f} / {reserved / GIB:.1f} GiB" in picture.svg


def test_a_block_counts_for_every_arm_that_left_a_receipt() -> None:
    spec = make_spec()
    plan = make_plan(spec)
    receipts = make_receipts(plan, sd=0.05)
    missing = [r for r in receipts if (r.ids.block_index, r.arm) != (3, "psiv-on")]
    summaries = judge(plan, spec, missing, CALIBRATED).arms
    assert isinstance(summaries["baseline"], ArmSummary)
    assert summaries == {arm.name: summarise_arm([r for r in missing if r.arm == arm.name]) for arm in plan.arms}


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_micro_batch_is_below_the_first_that_ran_out_of_memory(seed: int) -> None:
    """Draw rows and outcomes, and go up from the fewest rows; one arm differs in another gate as well."""
    rng = random.Random(seed)  # noqa: S311  # not for secrets
    rows = dict(zip(("baseline", "v1", "v2", "v3"), rng.sample([1, 2, 4, 8, 16, 32], 4), strict=True))
    variants = {name: {"gates": {"micro_batch": count}} for name, count in rows.items() if name != "baseline"}
    variants["other"] = {"gates": {"micro_batch": 64, "chunk_size": 32}}
    spec = make_spec(baseline={"gates": {"micro_batch": rows["baseline"]}}, variants=variants)
    plan = make_plan(spec)
    for _ in range(40):
        limit = rng.choice([0, 1, 3, 7, 15, 31, 63, 64])
        odd = rng.choice([None, *rows])  # one of its six trials failed
        outcomes = {name: 6 * [Outcome.MEASURED if count <= limit else Outcome.OOM] for name, count in rows.items()}
        outcomes["other"] = 6 * [rng.choice([Outcome.MEASURED, Outcome.OOM])]
        if odd is not None:
            outcomes[odd][rng.randrange(6)] = Outcome.FAILED
        trials = {name: [SimpleNamespace(outcome=one) for one in own] for name, own in outcomes.items()}
        largest = largest_micro_batch(plan, cast("Any", trials.__getitem__))
        upwards = sorted(rows, key=rows.__getitem__)
        fitting = [name for name in upwards if rows[name] <= limit and name != odd]
        beyond = [name for name in upwards if rows[name] > limit]
        if not fitting or not beyond:
            assert largest is None
        else:
            assert largest is not None
            assert (largest.arm, largest.rows) == (fitting[-1], rows[fitting[-1]])
            assert (largest.too_many_arm, largest.too_many_rows) == (beyond[0], rows[beyond[0]])


def test_the_first_line_says_which_micro_batch_fits_and_whether_it_pays() -> None:
    counts = {"baseline": 2, "rows-4": 4, "rows-8": 8, "rows-16": 16}
    variants = {name: {"gates": {"micro_batch": count}} for name, count in counts.items() if name != "baseline"}
    spec = make_spec(baseline={"gates": {"micro_batch": 2}}, variants=variants)
    plan, speeds = make_plan(spec), {"baseline": 100_000, "rows-4": 120_000, "rows-8": 119_000}

    def trial(block: BlockPlan, arm: str, broken: str) -> Receipt:
        peak = counts[arm] * GIB
        if counts[arm] >= counts[broken]:
            return make_receipt(plan, block, arm, outcome="oom", steps=(), message="out of memory", peak_bytes=peak)
        speed = speeds[arm] * (1 + 0.001 * ((block.index + len(arm)) % 3))
        return make_receipt(plan, block, arm, tokens_per_s=speed, peak_bytes=peak)

    receipts = [trial(block, arm, "rows-16") for block in plan.blocks for arm in block.order]
    verdict = judge(plan, spec, receipts, CALIBRATED)
    lead = lay_out(verdict).lead.replace(wording.SPACE, " ")
    assert lead.startswith("Adopt one of rows-4 (")
    assert "The largest micro-batch that fits has 8 rows (rows-8, peak 4.00 GiB): throughput is 1" in lead
    assert lead.endswith("% confidence, 6 blocks). 16 rows (rows-16) ran out of memory at 8.00 GiB.")
    assert lay_out(verdict).lead in verdict_markdown(verdict)
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict
    receipts = [trial(block, arm, "rows-4") for block in plan.blocks for arm in block.order]
    lead = lay_out(judge(plan, spec, receipts, CALIBRATED)).lead.replace(wording.SPACE, " ")
    small = "The largest micro-batch that fits has 2 rows (baseline, peak 1.00 GiB). 4 rows (rows-4) ran out of memory"
    assert small in lead
    whole = judge(PLAN, make_spec(), make_receipts(PLAN, sd=0.01), CALIBRATED)
    assert whole.largest_micro_batch is None
    assert "micro-batch" not in lay_out(whole).lead
