"""A declared metric that decides, on the page, in the terminal, in Markdown and in MLflow."""

import dataclasses
import html
import io
import math
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ablate.experiments.design.plan import controlled
from ablate.experiments.records.program_report import EvaluationReport
from ablate.experiments.records.receipts import Receipt, seal
from ablate.experiments.reporting import sentences, wording
from ablate.experiments.reporting.mlflow.parent import parent
from ablate.experiments.reporting.mlflow.runs import children
from ablate.experiments.reporting.pages.first_screen import deciding_values, trial_values
from ablate.experiments.reporting.pages.report import render
from ablate.experiments.reporting.pictures.forest import effects
from ablate.experiments.reporting.pictures.trials import logged_curves
from ablate.experiments.reporting.terminal.markdown import verdict_markdown
from ablate.experiments.reporting.view import AblationView
from ablate.service.cli import verdict_tables
from tests import views
from tests.program_receipts import plan_of, program_receipt, program_receipts


def view_of(better: str, *, effect: float = -0.05, zero: bool = False) -> AblationView:
    """Return a completed ablation whose variant has exp(effect) times the baseline's number."""
    spec, plan = plan_of(
        workload__metrics={"val_bpb": {"better": better}},
        verdict__require=[{"metric": "val_bpb", "not_worse_by": "1%"}],
    )
    rng = np.random.default_rng(1)
    values: dict[Any, Any] = {
        (block.index, arm): {
            "val_bpb": math.exp(rng.normal(0, 0.001) + (effect if arm == "fused" else 0)) + block.seed / 50,
            "odd name!": 3.0,
        }
        for block in plan.blocks
        for arm in block.order
    }
    if zero:
        values[2, "fused"]["val_bpb"] = 0.0
    receipts = program_receipts(plan, values)
    return views.judged_view(spec, plan, receipts)


def terminal(view: AblationView) -> str:
    assert view.verdict is not None
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    console.print(verdict_tables.verdict(view.verdict))
    for line in verdict_tables.explanation(view.verdict):
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("better", "word", "decision", "result"),
    [("lower", "better", "adopt", "passed"), ("higher", "worse", "reject", "FAILED")],
)
def test_every_medium_says_the_direction(better: str, word: str, decision: str, result: str) -> None:
    view = view_of(better)
    assert view.verdict is not None
    page, text, markdown = render(view), terminal(view), verdict_markdown(view.verdict)
    for medium in (page, text, markdown):
        assert "val_bpb is " in medium
        assert "lower" in medium
        assert decision in medium
    assert "val_bpb decides over 6 blocks" in page
    assert "% lower (" in page
    assert "proved to be worse than the baseline&#39;s by less than 1%" in page
    assert f"{result}" in text
    assert view.answer is not None
    assert view.answer.rule.adopt_from_pct == (-1.5 if better == "lower" else 1.5)
    runs = {run.identity: run for run in children(view)}
    assert runs["arm/fused"].tags["ablation.metric"] == "val_bpb"
    assert runs["arm/fused"].tags["ablation.verdict"] == word
    trial = next(run for name, run in runs.items() if name.startswith("trl_0_fused"))
    values = {point.key: point.value for point in trial.points}
    assert values["reported/odd name_x21_"] == 3.0
    assert 0.9 < values["val_bpb"] < 1.1
    assert len([point for point in runs["arm/fused"].points if point.key == "difference_pct"]) == 6
    assert parent(view, page).tags["ablation.metric"] == "val_bpb"


@pytest.mark.parametrize("zero", [False, True])
def test_the_page_shows_the_number_of_every_trial_and_no_model_of_ours(zero: bool) -> None:
    view = view_of("lower", zero=zero)
    table = trial_values(view)
    assert table is not None
    assert [column.heading for column in table.columns] == ["block", *(arm.name for arm in view.plan.arms)]
    shown = {
        (cells[0].text, arm.name): cell.numbers["value"]
        for cells in table.rows
        for arm, cell in zip(view.plan.arms, cells[1:], strict=True)
    }
    measured = {
        (str(receipt.ids.block_index + 1), receipt.arm): receipt.program.reported["val_bpb"]
        for receipt in view.receipts
        if receipt.program
    }
    assert shown == measured
    assert len(shown) == 12
    assert "not asked" not in terminal(view)
    commits = {"environment": view.receipts[0].environment.model_copy(update={"git_commit": "43b7f4e91c0d"})}
    trials = [dataclasses.replace(t, receipt=t.receipt.model_copy(update=commits)) for t in view.trials if t.receipt]
    view = dataclasses.replace(view, trials=tuple(trials))
    page = html.unescape(render(view))
    assert all(f"{value:.6g}" in page for value in measured.values())
    assert "<summary>Every trial: val_bpb</summary>" in page
    assert re.search("commit of Ablate.*43b7f4e91c0d", page, re.DOTALL)
    assert not re.search(">(git commit|parameters|data|code|model FLOPs of one step)<", page.partition("Provenance")[2])
    assert not {"mlflow.source.git.commit", "mlflow.source.git.dirty"} & set(parent(view, page).tags)


def test_a_value_without_a_ratio_is_named_everywhere() -> None:
    view = view_of("lower", zero=True)
    assert view.verdict is not None
    words = "no ratio: block 3, arm 'fused': val_bpb is 0, and a margin in percent needs numbers above zero"
    assert words in terminal(view)
    assert words in verdict_markdown(view.verdict)
    assert words.replace("'", "&#39;") in render(view)
    assert view.verdict.variants[0].requirements[0].undecided
    assert "not proved" in terminal(view)
    assert [run.tags["ablation.cause"] for run in children(view) if run.identity == "arm/fused"] == ["no ratio"]


def test_an_effect_between_the_margins_is_neither_met_nor_broken() -> None:
    variant = view_of("lower", effect=0.0105).verdict.variants[0]  # type: ignore[union-attr]
    (required,) = variant.requirements
    assert (required.passed, required.undecided) == (False, True)
    assert "neither proved nor disproved" in required.detail
    assert any(note.startswith("requirement not decided: val_bpb worse by less than 1 %") for note in variant.notes)


@pytest.mark.parametrize("seed", range(4))
def test_any_finite_numbers_of_a_program_are_shown_in_every_medium(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec, plan = plan_of()
    edges = [0.0, -0.0, 5e-324, 1e-308, 1e308, -1e308, 1.7e308, 1e154, 1.0, 2.0]
    values: dict[Any, Any] = {
        (block.index, arm): {"val_bpb": float(rng.choice(edges)), "odd\nname <b>\u202e": float(rng.choice(edges))}
        for block in plan.blocks
        for arm in block.order
    }
    kernels = [("k<&\0\u202e", 2**62 - 1, 1e12), ("zero", 0, 0.0)]
    loss = [0.0, 1e308, -1e308, 1e200][seed]
    curves = {"val_bpb": tuple((step, value) for step, value in zip([-(2**63), 0, 1, 2**63 - 1], edges, strict=False))}
    receipts = program_receipts(plan, values, more_loss=loss, kernels=kernels, curves=curves)
    view = views.judged_view(spec, plan, receipts)
    assert view.verdict is not None
    page = render(view)
    assert "val_bpb" in page
    assert "final training loss" in page
    assert ", nats" not in page, "nobody knows the unit of a program's loss"
    assert "final training loss, nats" in render(views.cpu_view())
    assert "val_bpb" in verdict_markdown(view.verdict)
    assert "val_bpb" in terminal(view)
    for run in (parent(view, None), *children(view)):
        assert run.digest


def test_every_medium_says_that_an_evaluation_measured() -> None:
    spec, plan = plan_of(workload__code="/srv/lab", workload__evaluate=["python", "judge.py"])
    rng, receipts = np.random.default_rng(1), []
    evaluation = EvaluationReport(argv=("python", "judge.py"), code="sha256:0123", metrics=("val_bpb",), exit_code=0)
    for block in plan.blocks:
        for arm in block.order:
            made = program_receipt(plan, block, arm, reported={"val_bpb": 1.0 + rng.normal(0, 0.001)})
            assert made.program is not None
            program = made.program.model_copy(update={"evaluation": evaluation})
            receipts.append(seal({**made.model_dump(), "program": program}))
    view = views.judged_view(spec, plan, receipts)
    assert view.verdict is not None
    page, text = render(view), terminal(view)
    for medium in (html.unescape(page), " ".join(text.split())):
        assert "variables and code; val_bpb by the protected evaluation `python judge.py`" in medium
    assert "val_bpb: by the protected evaluation `python judge.py`, code 0123. " in html.unescape(page)
    assert "Reported by the program, or by its protected evaluation" in page


def test_logged_curves_are_drawn_and_stored_in_mlflow_at_the_programs_steps() -> None:
    spec, plan = plan_of(workload__metrics={"val_bpb": {"better": "lower", "from": "tensorboard"}})
    rng, receipts = np.random.default_rng(1), []
    for block in plan.blocks:
        for arm in block.order:
            values = [(10 * step, 2.0 - step / 10 + rng.normal(0, 0.001)) for step in range(5)]
            curves = {"val_bpb": tuple(values), "a": ((0, 1.0),), "b": ((0, 1.0),), "c": ((0, 1.0),)}
            last = {"val_bpb": values[-1][1]}
            receipts.append(program_receipt(plan, block, arm, reported=last, curves=curves))
    view = views.judged_view(spec, plan, receipts)
    picture = logged_curves(view)
    assert picture is not None
    assert "Not drawn: c." in picture.caption, "the deciding metric first"
    assert f"the range of the {len(plan.blocks)} trials of baseline" in picture.caption
    assert ">val_bpb</text>" in picture.svg
    assert "Logged curves" in render(view)
    points = [point for run in children(view) for point in run.points if point.key == "curve/val_bpb"]
    stored = {(point.step, point.value) for point in points}
    assert stored == {one for receipt in receipts if receipt.program for one in receipt.program.curves["val_bpb"]}
    without = [receipt.model_copy(update={"program": None}) for receipt in receipts]
    assert logged_curves(views.judged_view(spec, plan, without)) is None


def changed(receipt: Receipt, *, seed: int | None, losses: bool = True) -> Receipt:
    """Return a receipt of a program that reports this seed, and its losses or none."""
    assert receipt.program is not None
    program = receipt.program.model_copy(update={"seed": seed})
    steps = receipt.steps if losses else tuple(step.model_copy(update={"loss": None}) for step in receipt.steps)
    return seal({**receipt.model_dump(), "program": program, "steps": steps})


def test_the_control_stands_beside_the_variants_in_every_medium() -> None:
    spec, plan = plan_of(verdict__primary={"metric": "tokens_per_s", "margin": "1%"})
    plan, rng = controlled(spec, plan), np.random.default_rng(1)
    receipts = []
    for block in plan.blocks:
        for arm in block.order:
            step_s = 0.02 * math.exp(rng.normal(0, 0.01) + (0.5 if arm == "fused" else 0))
            receipts.append(program_receipt(plan, block, arm, reported={"val_bpb": 1.0}, step_s=step_s))
    view = views.judged_view(spec, plan, receipts)
    assert view.verdict is not None
    control = view.verdict.control
    assert control is not None
    assert {control.primary.alpha} == {one.primary.alpha for one in view.verdict.variants if one.primary is not None}
    effect = wording.percent(control.primary.delta_pct)
    for medium in (render(view), " ".join(terminal(view).split()), verdict_markdown(view.verdict)):
        assert "repeats the baseline" in medium
        assert " ".join(effect.split()) in " ".join(medium.split())
    deciding = deciding_values(view)
    assert deciding is not None
    assert [cells[0].text for cells in deciding.rows] == ["baseline", "fused", "control"]
    assert deciding.rows[2][4].text == effect
    forest = effects(view.verdict)
    assert forest is not None
    assert ">control<" in forest.svg


@pytest.mark.parametrize("drawn", [True, False])
def test_a_page_without_a_curve_says_what_to_print(drawn: bool) -> None:
    spec, plan = plan_of()
    curves: Any = {"loss": ((1, 2.0), (2, 1.0))} if drawn else {}
    receipts = [
        changed(program_receipt(plan, block, arm, reported={"val_bpb": 1.0}, curves=curves), seed=1, losses=False)
        for block in plan.blocks
        for arm in block.order
    ]
    page = render(views.judged_view(spec, plan, receipts))
    assert ("picture-logged" in page) == drawn
    assert ("print a line such as <code>METRIC loss=0.5</code>" in page) != drawn
    assert "picture-losses" not in page, "there is no loss to draw"


@pytest.mark.parametrize("takes", ["argument", "report", "nothing"])
def test_seeds_are_offered_only_of_a_program_that_takes_them(takes: str) -> None:
    command = ["python", "train.py", *(["--seed", "{seed}"] if takes == "argument" else [])]
    spec, plan = plan_of(workload__command=command)
    receipts = [
        changed(
            program_receipt(plan, block, arm, reported={"val_bpb": 1.0 + 0.01 * block.seed}),
            seed=block.seed if takes == "report" else None,
        )
        for block in plan.blocks
        for arm in block.order
    ]
    view = views.judged_view(spec, plan, receipts)
    assert view.verdict is not None
    for text in (sentences.seeds(view.verdict) or "", terminal(view)):
        assert ("--seeds " in " ".join(text.split())) == (takes != "nothing")
    assert ("<dt>Seeds</dt>" in render(view)) == (takes != "nothing")
