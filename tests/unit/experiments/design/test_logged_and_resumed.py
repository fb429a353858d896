"""Specs whose metrics are logged, and whose programs are killed and resumed: what they accept, and what they refuse."""

from dataclasses import replace
from typing import Any

import pytest

from ablate.experiments.design.arms import read_config
from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.plan import make_plan, questions
from tests.factories import command_values as values
from tests.factories import with_changes
from tests.unit.experiments.design.test_command_spec import SCHEMA, parse, problems


def test_a_metric_may_be_logged_to_a_tracker() -> None:
    made = values(workload__metrics={"val": {"better": "lower", "from": "tensorboard", "tag": "eval/loss"}, "b": {
        "better": "higher", "from": "mlflow", "run": "eval"}})  # fmt: skip
    assert (problems(made), list(SCHEMA.iter_errors(made))) == ([], [])
    config = make_plan(parse(made)).baseline.config
    assert isinstance(config, CommandArm)
    assert {name: str(place) for name, place in config.logged.items()} == {
        "val": "tensorboard: eval/loss",
        "b": "mlflow: b of run eval",
    }
    assert read_config(config.values_with_seed) == config
    assert parse(made).model_dump(mode="json")["workload"]["metrics"] == made["workload"]["metrics"]


@pytest.mark.parametrize(
    ("metric", "where", "words"),
    [
        ({"from": "neptune"}, "/from", "tensorboard"),
        ({"from": "wandb", "line": "val {}"}, "", "'line' and 'from' are two places of one number"),
        ({"tag": "a"}, "", "'tag' belongs to a metric that is logged"),
        ({"run": "a"}, "", "'run' belongs to a metric that is logged"),
        ({"from": "wandb", "tag": ""}, "/tag", "at least 1"),
        ({"from": "wandb", "tagg": "a"}, "/tagg", "better, line, from, tag, run"),
    ],
)
def test_a_place_of_a_metric_that_is_none_is_refused(metric: dict[str, str], where: str, words: str) -> None:
    made = values(workload__metrics={"val": {"better": "lower", **metric}})
    ((pointer, detail),) = problems(made)
    assert (pointer, words in detail) == (f"#/workload/metrics/val{where}", True), detail
    assert list(SCHEMA.iter_errors(made))


def test_logged_metrics_that_nobody_could_read_are_refused() -> None:
    logged = {"val": {"better": "lower", "from": "wandb"}, "other": {"better": "lower", "from": "mlflow"}}
    where = "#/workload/metrics/val/from"
    found = dict(problems(values(workload__metrics=logged, placement__nodes=2)))
    assert found[where] == "what is logged is read on one node, and this program runs on 2"
    found = dict(problems(values(workload__metrics=logged, workload__evaluate=["python", "judge.py"])))
    assert found[where] == "the protected evaluation measures all metrics, and reports or prints them"
    own = {"WANDB_MODE": "online", "MLFLOW_TRACKING_URI": "file:/a", "OTHER": "1"}
    first = values(workload__metrics=logged, workload__env=own)
    name = next(iter(first["variants"]))
    first["variants"][name]["env"] = {"WANDB_DIR": "/a"}
    assert [place for place, _detail in problems(first)] == [
        "#/workload/env/MLFLOW_TRACKING_URI",
        "#/workload/env/WANDB_MODE",
        f"#/variants/{name}/env/WANDB_DIR",
    ]
    assert problems(values(workload__env=own)) == []


def resumed_values(**changes: Any) -> dict[str, Any]:
    made = values(
        variants={"resumed": {"resume_at": 5}},
        design__seeds=[1, 2, 3],
        verdict={"primary": {"metric": "loss_final", "margin": "0%"}},
    )
    return with_changes(made, changes)


def test_a_variant_may_be_killed_and_resumed() -> None:
    made = resumed_values()
    assert (problems(made), list(SCHEMA.iter_errors(made))) == ([], [])
    plan = make_plan(parse(made))
    first, second = (arm.config for arm in plan.arms)
    assert isinstance(first, CommandArm)
    assert isinstance(second, CommandArm)
    assert (first.resume_at, second.resume_at) == (None, 5)
    assert replace(second, resume_at=None) == first
    assert [arm.gates["resume_at"] for arm in plan.arms] == [0, 5]
    assert "resume_at" not in first.values_with_seed
    assert read_config(second.values_with_seed) == second
    assert set(questions(parse(made), plan)) == {"resumed"}
    other = make_plan(parse(resumed_values(variants__resumed__resume_at=6)))
    assert other.arms[1].digest != plan.arms[1].digest


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"variants__resumed__resume_at": 8}, "#/variants/resumed/resume_at", "a trial has 8 steps"),
        ({"variants__resumed__resume_at": 0}, "#/variants/resumed/resume_at", "at least 1"),
        ({"variants__resumed__resume_at": "5"}, "#/variants/resumed/resume_at", "an integer"),
        ({"placement__nodes": 2}, "#/variants/resumed/resume_at", "runs on several"),
        ({"workload__profile": True}, "#/variants/resumed/resume_at", "no profiled step"),
        (
            {"workload__metrics": {"val": {"better": "lower", "from": "wandb"}}},
            "#/variants/resumed/resume_at",
            "may end within a record",
        ),
        ({"verdict": {"primary": {"metric": "step_s", "margin": "1%"}}}, "#/verdict/primary/metric", "killed"),
        ({"verdict": {"primary": {"metric": "process_s", "margin": "1%"}}}, "#/verdict/primary/metric", "killed"),
        (
            {"verdict__require": [{"metric": "peak_allocated_gib", "max_delta": 1.0}]},
            "#/verdict/require/0/metric",
            "killed",
        ),
    ],
)
def test_a_resumed_run_that_cannot_be_is_refused(changes: dict[str, Any], where: str, words: str) -> None:
    found = problems(resumed_values(**changes))
    assert [pointer for pointer, detail in found if words in detail] == [where], found
