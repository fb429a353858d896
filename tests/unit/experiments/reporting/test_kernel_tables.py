"""The kernels of a profiled step in verdict, page, terminal and MLflow, the same for commands and recipes."""

import csv
import dataclasses
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.programs import MOST_CHANGES, kernels_of
from ablate.experiments.analysis.verdicts import KernelChange, StepKernels, VariantVerdict
from ablate.experiments.documents import seal
from ablate.experiments.outcomes import FailureClass, Outcome, VerdictWord
from ablate.experiments.records.circumstances import CALIBRATED
from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.mlflow.runs import KERNELS_FILE, arm_runs
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.view import AblationView
from ablate.model.measurements import KernelFacts
from ablate.service.cli import verdict_tables
from tests import views
from tests.program_receipts import plan_of, program_receipt

Rows = Sequence[tuple[str, int, float]]
Facts = Mapping[str, KernelFacts]

BASE: Rows = [("gemm", 4, 400.0), ("softmax", 2, 50.0), ("cross_entropy", 1, 120.0)]
FUSED: Rows = [("gemm", 4, 401.0), ("softmax", 3, 70.0), ("liger_cross_entropy", 1, 30.0)]


def command_view(
    own: Rows,
    base: Rows = BASE,
    *,
    without: int | None = None,
    facts: Callable[[int, str], Facts] = lambda _block, _arm: {},
    **changes: Any,
) -> AblationView:
    """Return a completed ablation of a command; the trial of block `without` has no table."""
    spec, plan = plan_of(verdict__primary={"metric": "step_s", "margin": "0.5%"}, **changes)
    receipts = [
        program_receipt(
            plan,
            block,
            arm,
            reported={"val_bpb": 1.5 + block.index / 10},
            kernels=() if block.index == without else own if arm == "fused" else base,
            kernel_facts=facts(block.index, arm),
            step_s=0.02 * (1 + 0.0001 * block.index + (0.01 if arm == "fused" else 0)),
        )
        for block in plan.blocks
        for arm in block.order
    ]
    return views.judged_view(spec, plan, receipts)


def recipe_view(own: Rows, base: Rows = BASE) -> AblationView:
    """Return a completed ablation of a recipe whose trials have profiled steps."""
    arms = {name: views.EFFECTS[name] for name in ("baseline", "psiv-on")}
    made = views.view(arms=arms, num_blocks=6, timed=4)
    receipts = [
        seal(one.receipt.model_copy(update={"step_kernels": tuple(own if one.arm == "psiv-on" else base)}))
        for one in made.trials
        if one.receipt is not None
    ]
    from ablate.experiments.design.load import parse_spec

    verdict = judge(made.plan, parse_spec(made.spec_text.encode(), made.content_type), receipts, CALIBRATED)
    return dataclasses.replace(made, trials=tuple(map(views.trial_of, receipts)), verdict=verdict)


def only(view: AblationView) -> VariantVerdict:
    assert view.verdict is not None
    (variant,) = view.verdict.variants
    return variant


def kernels(view: AblationView) -> StepKernels:
    step_kernels = only(view).step_kernels
    assert step_kernels is not None
    return step_kernels


@pytest.mark.parametrize("made", [command_view, recipe_view])
def test_the_difference_of_two_tables_is_the_same_for_commands_and_recipes(made: Any) -> None:
    view = made(FUSED)
    step_kernels = kernels(view)
    assert (step_kernels.same, step_kernels.kernels) == (False, 4)
    assert [(one.name, one.kind, one.change_us) for one in step_kernels.changes] == [
        ("cross_entropy", "only in the baseline", -120.0),
        ("liger_cross_entropy", "only in the variant", 30.0),
        ("softmax", "calls", 20.0),
        ("gemm", "time", 1.0),
    ]
    assert any("these arms ran different kernels" in note for note in only(view).notes)
    assert view.verdict is not None
    page = render(view)
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    for one in verdict_tables.kernels(view.verdict):
        console.print(one)
    terminal = console.file.getvalue()  # type: ignore[attr-defined]
    files = {run.name.partition(":")[0]: run.texts.get(KERNELS_FILE) for run in arm_runs(view)}
    markdown = parent(view, "").texts["kernels.md"]
    (arm,) = [variant.arm for variant in view.verdict.variants]
    for text in (page, terminal, str(files[arm]), markdown):
        assert "liger_cross_entropy" in text
        assert "only in the baseline" in text
    assert files["baseline"] is None
    rows = list(csv.DictReader(io.StringIO(str(files[arm]))))
    assert [(row["kernel"], row["calls"], row["calls_baseline"], row["change_us"]) for row in rows][:2] == [
        ("cross_entropy", "", "1.0", "-120.0"),
        ("liger_cross_entropy", "1.0", "", "30.0"),
    ]
    what = "Operators" if view.plan.node_class == "cpu" else "Kernels"
    assert f"{what} of {arm} against the baseline" in page


@pytest.mark.parametrize("made", [command_view, recipe_view])
def test_two_arms_with_the_same_kernels_say_so(made: Any) -> None:
    view = made([(name, calls, 1.01 * us) for name, calls, us in BASE])
    assert kernels(view).same
    assert {one.kind for one in kernels(view).changes} == {"time"}
    assert any("the same kernels, equally often" in note for note in only(view).notes)
    assert "equally often; sizes may differ" in render(view)


def test_without_a_table_of_every_trial_nothing_is_compared() -> None:
    view = command_view(FUSED, without=2)
    assert only(view).step_kernels is None
    assert "kernels.md" not in parent(view, "").texts
    assert all(KERNELS_FILE not in run.texts for run in arm_runs(view))
    assert "step_kernels" not in only(view).model_dump(mode="json")


def test_a_refused_arm_shows_what_ran_in_place_of_its_kernel() -> None:
    view = command_view(BASE)
    spec, plan = plan_of(verdict__primary={"metric": "step_s", "margin": "0.5%"})
    receipts = [trial.receipt for trial in view.trials if trial.receipt]
    refused = {"outcome": Outcome.REFUSED, "failure_class": FailureClass.GATE_REFUSED, "message": "no 'liger_.*'"}
    receipts = [seal(one.model_copy(update=refused)) if one.arm == "fused" else one for one in receipts]
    (variant,) = judge(plan, spec, receipts, CALIBRATED).variants
    assert variant.verdict is VerdictWord.REFUSED
    assert variant.step_kernels is not None
    assert variant.step_kernels.same
    assert any("the same kernels, equally often" in note for note in variant.notes)


def test_random_tables_lose_no_microsecond() -> None:
    rng = random.Random(3)  # noqa: S311  # reproducible by design
    for _ in range(20):
        own, base = (
            [(f"k{rng.randrange(60)}", rng.randrange(1, 9), rng.uniform(0, 1e6)) for _ in range(rng.randrange(1, 90))]
            for _ in range(2)
        )
        view = command_view(own, base)
        step_kernels = kernels(view)
        assert step_kernels.kernels == len({name for name, *_ in (*own, *base)})
        assert len(step_kernels.changes) == min(MOST_CHANGES, step_kernels.kernels)
        (text,) = [run.texts[KERNELS_FILE] for run in arm_runs(view) if KERNELS_FILE in run.texts]
        rows = list(csv.DictReader(io.StringIO(text)))
        assert len(rows) == step_kernels.kernels
        total = sum(us for _, _, us in own) - sum(us for _, _, us in base)
        assert sum(float(row["change_us"]) for row in rows) == pytest.approx(total, abs=1e-2)
        sizes = [abs(float(row["change_us"])) for row in rows]
        assert sizes == sorted(sizes, reverse=True)
        calls: Counter[str] = Counter()
        for name, count, _us in own:
            calls[name] += count
        receipts = [trial.receipt for trial in view.trials if trial.arm == "fused" and trial.receipt]
        assert {name: use.calls for name, use in kernels_of(receipts).items()} == calls


def test_names_of_a_program_cannot_control_a_terminal_or_break_a_table() -> None:
    view = command_view([("\x1b[2Jevil|<b>\n", 1, 1e6), *BASE])
    assert view.verdict is not None
    (text,) = [run.texts[KERNELS_FILE] for run in arm_runs(view) if KERNELS_FILE in run.texts]
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    for one in verdict_tables.kernels(view.verdict):
        console.print(one)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for output in (text, shown, parent(view, "").texts["kernels.md"], render(view)):
        assert "\x1b" not in output
    assert "<b>" not in render(view)
    assert len(list(csv.reader(io.StringIO(text)))) == 5
    assert only(view).primary is not None
    assert {trial.receipt.outcome for trial in view.trials if trial.receipt} == {Outcome.MEASURED}


def launched(registers: int, occupancy: float | None = 0.5, *, blocks: int = 64, launches: int = 1) -> KernelFacts:
    return KernelFacts(
        registers=registers,
        shared_bytes=49152,
        block=(128, 1, 1),
        grid=(blocks, 1, 1),
        launches=launches,
        occupancy=occupancy,
    )


def change_of(view: AblationView, name: str) -> KernelChange:
    (change,) = [one for one in kernels(view).changes if one.name == name]
    return change


def terminal_of(view: AblationView) -> str:
    assert view.verdict is not None
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    for one in verdict_tables.kernels(view.verdict):
        console.print(one)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_another_launch_of_the_same_kernel_is_named() -> None:
    def facts(_block: int, arm: str) -> Facts:
        return {"gemm": launched(168, 0.25) if arm == "fused" else launched(128), "softmax": launched(32)}

    view = command_view(BASE, facts=facts)
    words = ("168 instead of 128 registers", "an occupancy of 25.0% instead of 50.0%")
    assert change_of(view, "gemm").launch_differences == words
    assert change_of(view, "gemm").kind == "launch"
    assert [change_of(view, name).kind for name in ("softmax", "cross_entropy")] == ["time", "time"]
    (note,) = [note for note in only(view).notes if "in the profiled step" in note]
    assert note.endswith(f"; the variant's gemm has {', '.join(words)}")
    assert kernels(view).same, "they are called equally often"
    (arm,) = [variant.arm for variant in view.verdict.variants] if view.verdict else []
    title = f"Launches of the kernels of {arm} against the baseline"
    for text in (render(view), terminal_of(view), parent(view, "").texts["kernels.md"]):
        assert title in text
        assert "128 → 168" in text
        assert "50\N{NO-BREAK SPACE}% → 25\N{NO-BREAK SPACE}%" in text
        assert "TFLOP/s</" not in text, "no product is known"
    (text,) = [run.texts[KERNELS_FILE] for run in arm_runs(view) if KERNELS_FILE in run.texts]
    rows = {row["kernel"]: row for row in csv.DictReader(io.StringIO(text))}
    both = ("registers", "registers_baseline", "block", "occupancy", "occupancy_baseline")
    assert [rows["gemm"][key] for key in both] == ["168", "128", "128x1x1", "0.25", "0.5"]
    assert [rows["cross_entropy"][key] for key in both] == [""] * 5
    assert "product_us" not in rows["gemm"]


def test_an_occupancy_that_stays_is_not_named() -> None:
    view = command_view(BASE, facts=lambda _block, arm: {"gemm": launched(168 if arm == "fused" else 128)})
    assert change_of(view, "gemm").launch_differences == ("168 instead of 128 registers",)


def test_more_blocks_of_a_kernel_are_another_size_and_no_other_launch() -> None:
    view = command_view(BASE, facts=lambda _block, arm: {"gemm": launched(128, blocks=99 if arm == "fused" else 64)})
    assert change_of(view, "gemm").launch_differences == ()
    assert {one.kind for one in kernels(view).changes} == {"time"}


def test_facts_of_an_arm_are_the_longest_launch_and_means_of_all_its_trials() -> None:
    def facts(block: int, arm: str) -> Facts:
        return {"gemm": views.kernel_facts(168 if block < 2 else 128, us=100.0 + block), "softmax": launched(32, None)}

    view = command_view(BASE, facts=facts)
    blocks = len(view.plan.blocks)
    use = change_of(view, "gemm").variant
    assert use is not None
    assert use.facts is not None
    assert (use.facts.registers, use.facts.launches) == (128, 2), "of most trials, of which all take equally long"
    assert use.facts.product_us == pytest.approx(100 + (blocks - 1) / 2)
    assert use.facts.flops_per_s == pytest.approx(8 * 4096**3 / (100 + (blocks - 1) / 2) * 1e6)
    assert "TFLOP/s" in render(view)
    softmax = change_of(view, "softmax").baseline
    assert softmax is not None
    assert softmax.facts is not None
    assert softmax.facts.occupancy is None, "no trial knows it"


def test_without_facts_of_each_trial_there_are_none() -> None:
    view = command_view(BASE, facts=lambda block, _arm: {} if block == 1 else {"gemm": launched(128)})
    assert all(use is None or use.facts is None for one in kernels(view).changes for use in (one.variant, one.baseline))
    assert "Launches of the kernels" not in render(view)
    assert "facts" not in json.dumps(only(view).model_dump(mode="json")["step_kernels"])
