"""Questions of `ablate ask`: the service's reader of the spec is the oracle."""

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.experiments.design.arms import resolve
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.errors import SpecError
from ablate.service.cli.asking import CheckedTimes, asked_change, divided


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("python train.py --lr 1", "--lr 1"),
        ("python -u src/train.py conf.yaml", "conf.yaml"),
        ("python -m lab.train --lr 1", "--lr 1"),
        ("torchrun --nproc-per-node=2 train.py --lr 1", "--lr 1"),
        ("./train --lr 1", "--lr 1"),
        ("train", ""),
    ],
)
def test_the_arguments_of_a_command_begin_after_its_script(command: str, args: str) -> None:
    shared, own = divided(shlex.split(command))
    assert shlex.join(own) == args
    assert [*shared, *own] == shlex.split(command)


def times(**changes: object) -> CheckedTimes:
    fields = {"node_class": "cpu", "seed": None, "marks": "tokens", "is_quiet": True, "step_s": 0.1, "start_s": 5.0}
    fields |= {
        "can_take_turns": True,
        "own_steps": None,
        "cpu_step_s": None if changes.get("marks") == "process" else 0.1,
    }
    return CheckedTimes(**{**fields, "longest_s": 10.0, **changes})  # type: ignore[arg-type]


CODE = {"archive": f"sha256:{64 * '0'}"}


@pytest.mark.parametrize(
    ("changes", "primary"),
    [
        ({"changes": ("--lr", "2e-3")}, "tokens_per_s"),
        ({"env": {"OMP_NUM_THREADS": "1"}}, "tokens_per_s"),
        ({"changes": ("--lr", "2e-3"), "metric": "val loss {}"}, "val_loss"),
        ({"changes": ("--lr", "2e-3"), "metric": "loss_val {}"}, "reported_loss_val"),
        ({"changes": ("--lr", "2e-3"), "metric": "peak_allocated_gib"}, "peak_allocated_gib"),
        ({"changes": ("--lr", "2e-3"), "metric": "accuracy"}, "accuracy"),
        ({"changes": ("--lr", "2e-3"), "metric": "tensorboard:eval/loss"}, "eval_loss"),
        ({"changes": ("--lr", "2e-3"), "metric": "wandb:{}"}, "wandb"),
        ({"changes": ("--name", "baseline", "control: # x")}, "tokens_per_s"),
        ({"changes": ("baseline",)}, "tokens_per_s"),
        ({"env": {"A": "1"}, "data": ("/lab/.venv",), "search_path": "src"}, "tokens_per_s"),
    ],
)
def test_a_question_is_a_spec_that_the_service_takes(changes: dict[str, object], primary: str) -> None:
    question = asked_change(("python", "train.py", "--lr", "1e-3", "--seed", "{seed}"), **changes)  # type: ignore[arg-type]
    for values in (question.spec(), question.spec(times())):
        values["workload"]["code"] = CODE
        spec = parse_spec(spec_yaml(values), "application/yaml")
        resolution = resolve(spec)
        assert resolution.problems == ()
        assert [arm.name for arm in resolution.arms] == ["baseline", *question.variants]
        assert spec.workload.env == ({"PYTHONPATH": "src"} if "search_path" in changes else {})
    assert spec.verdict.primary.metric == primary


def test_directions_and_loads_follow_from_the_metric() -> None:
    def asked(metric: str, **more: object) -> tuple[str, str | None]:
        question = asked_change(("a", "{seed}"), changes=("--x",), metric=metric, **more)  # type: ignore[arg-type]
        values = question.spec(times())
        return values["workload"]["metrics"][str(question.declared)]["better"], values["placement"].get(
            "max_foreign_load"
        )

    assert asked("val loss {}") == ("lower", "99%")
    assert asked("top-1 accuracy {}%") == ("higher", "99%")
    assert asked("mlflow:val/acc") == ("higher", "99%")
    assert asked("tok/s: {}", better="higher") == ("higher", None)
    assert asked("val loss {}", better="higher") == ("higher", "99%")


@given(step_s=st.floats(1e-7, 100), start_s=st.floats(0, 1000), blocks=st.integers(6, 40))
def test_trials_fit_into_the_time_of_a_first_answer(step_s: float, start_s: float, blocks: int) -> None:
    question = asked_change(("a",), changes=("--x",), blocks=blocks)
    values = question.spec(times(step_s=step_s, start_s=start_s, longest_s=start_s + step_s))
    timed = values["workload"]["steps"]["timed"]
    assert 10 <= timed <= 5000
    assert timed == 10 or (timed - 1) * step_s <= 15
    assert (
        values["limits"]["device_minutes"] * 60 >= 5 * question.expected_s(times(step_s=step_s, start_s=start_s)) - 60
    )


@pytest.mark.parametrize("marks", ["process", "steps", "tokens"])
def test_speed_is_decided_by_what_the_program_marks(marks: str) -> None:
    step_s = None if marks == "process" else 0.1
    values = asked_change(("a",), changes=("--x",)).spec(times(marks=marks, step_s=step_s))
    assert values["verdict"]["primary"]["metric"] == {"process": "process_s", "steps": "step_s"}.get(
        marks, "tokens_per_s"
    )
    assert ("steps" in values["workload"]) == (marks != "process")


def test_a_busy_machine_is_measured_with_all_its_load() -> None:
    question = asked_change(("a",), changes=("--x",))
    assert "max_foreign_load" not in question.spec(times())["placement"]
    assert question.spec(times(is_quiet=False))["placement"]["max_foreign_load"] == "99%"
    work = asked_change(("a",), changes=("--x",), metric="cpu_s").spec(times())
    assert (work["placement"]["max_foreign_load"], work["verdict"]["primary"]["metric"]) == ("99%", "cpu_s")


@settings(max_examples=200, deadline=None)
@given(
    step_s=st.none() | st.floats(0.01, 1.0), longest_s=st.floats(1.0, 300.0), variants=st.integers(1, 8),
    node_class=st.sampled_from(["cpu", "h200"]), metric=st.sampled_from([None, "cpu_s", "process_s", "loss {}"]),
    is_quiet=st.booleans(), can_take_turns=st.booleans(), allowed=st.booleans(),
)  # fmt: skip
def test_programs_without_marks_take_turns_by_the_clock_exactly_where_they_can_on_busy_cores_or_by_processor_time(
    *,
    step_s: float | None,
    longest_s: float,
    variants: int,
    metric: str | None,
    node_class: str,
    is_quiet: bool,
    can_take_turns: bool,
    allowed: bool,
) -> None:
    question = replace(
        asked_change(("python", "train.py", "{seed}"), changes=("--x",), metric=metric),
        variants={f"v{number}": {"args": [f"--x={number}"]} for number in range(variants)},
        may_take_turns=allowed,
    )
    own = {"node_class": node_class, "is_quiet": is_quiet, "can_take_turns": can_take_turns, "longest_s": longest_s}
    checked = times(marks="process", step_s=step_s, cpu_step_s=step_s, **own)  # steps: one of the arms marks them
    values, lines = question.spec(checked), list(question.of_busy_cores(checked))
    able = node_class == "cpu" and can_take_turns and allowed and metric in (None, "cpu_s") and variants < 7
    in_turns = able and (metric == "cpu_s" or not is_quiet) and step_s is None
    assert values["workload"].get("turns", False) == in_turns == any("take turns of half a" in line for line in lines)
    assert bool(lines) == (in_turns or not is_quiet)
    assert any("is busy" in line for line in lines) == (not is_quiet)
    primary = values["verdict"]["primary"]["metric"]
    if metric is None:
        assert primary == ("cpu_s" if in_turns else "process_s")
        assert in_turns == any("--metric process_s" in line for line in lines)
    if node_class == "cpu" and question.expected_s(checked) < 3600 and step_s is None:
        values["workload"]["code"] = "/srv/lab"
        make_plan(parse_spec(json.dumps(values).encode(), "application/json"))


@settings(max_examples=200, deadline=None)
@given(
    step_s=st.floats(1e-4, 20.0), start_s=st.floats(0.0, 60.0), asked=st.none() | st.integers(1, 5000),
    variants=st.integers(1, 8), marks=st.sampled_from(["steps", "tokens"]), node_class=st.sampled_from(["cpu", "h200"]),
    metric=st.sampled_from([None, "cpu_step_s", "step_s", "tokens_per_s", "cpu_s", "loss {}"]),
    is_quiet=st.booleans(), can_take_turns=st.booleans(), allowed=st.booleans(),
)  # fmt: skip
def test_trials_take_turns_of_a_quarter_second_of_work_exactly_where_they_can_on_busy_cores_or_by_processor_time(
    *,
    step_s: float,
    start_s: float,
    asked: int | None,
    variants: int,
    metric: str | None,
    marks: str,
    node_class: str,
    is_quiet: bool,
    can_take_turns: bool,
    allowed: bool,
) -> None:
    question = replace(
        asked_change(("python", "train.py", "{seed}"), changes=("--x",), metric=metric, steps=asked),
        variants={f"v{number}": {"args": [f"--x={number}"]} for number in range(variants)},
        may_take_turns=allowed,
    )
    checked = times(
        step_s=3 * step_s,
        cpu_step_s=step_s,
        start_s=start_s,
        marks=marks,
        node_class=node_class,
        is_quiet=is_quiet,
        can_take_turns=can_take_turns,
    )
    values, lines = question.spec(checked), list(question.of_busy_cores(checked))
    able = node_class == "cpu" and can_take_turns and allowed and metric not in ("cpu_s", "loss {}") and variants < 7
    steps = values["workload"]["steps"]
    in_turns = able and (metric == "cpu_step_s" or not is_quiet)
    assert ("slice" in steps) == in_turns == any("take turns" in line for line in lines)
    assert bool(lines) == (in_turns or not is_quiet)
    assert any("is busy" in line for line in lines) == (not is_quiet)
    primary = values["verdict"]["primary"]["metric"]
    if "slice" in steps:
        assert (primary == "cpu_step_s") == (metric in (None, "cpu_step_s"))
        assert (metric is None) == any("--metric" in line for line in lines)
        assert steps["timed"] % (2 * steps["slice"]) == 0
        assert steps["slice"] == 1 or steps["slice"] * step_s < 0.5
        assert steps["slice"] * step_s >= 0.125 or steps["slice"] in {1, steps["timed"] // 2, (asked or 0) // 2}
        least = asked or max(10, min(5000, 5.0 / step_s))
        assert least <= steps["timed"] < least + 2 * steps["slice"] + 1
    elif metric is None:
        assert primary == {"steps": "step_s", "tokens": "tokens_per_s"}[marks]
    if node_class == "cpu" and variants == 1 and question.expected_s(checked) < 3600:
        values["workload"]["code"] = "/srv/lab"
        make_plan(parse_spec(json.dumps(values).encode(), "application/json"))


@settings(max_examples=200, deadline=None)
@given(
    step_s=st.floats(1e-4, 20.0), own_steps=st.integers(4, 6000), is_quiet=st.booleans(),
    asked=st.none() | st.integers(1, 5000),
)  # fmt: skip
def test_a_trial_has_more_steps_than_the_loop_of_the_program_only_if_the_user_asks_for_them(
    *, step_s: float, own_steps: int, is_quiet: bool, asked: int | None
) -> None:
    question = asked_change(("python", "train.py"), changes=("--x",), steps=asked)
    free = times(step_s=step_s, cpu_step_s=step_s, is_quiet=is_quiet)
    short = replace(free, own_steps=own_steps)
    wanted, values = question.spec(free)["workload"]["steps"], question.spec(short)
    steps, lines = values["workload"]["steps"], [line for line in question.remarks(short) if "'s loop has" in line]
    has_room = asked is not None or 1 + wanted["warmup"] + wanted["timed"] <= own_steps
    assert has_room or 1 + steps["warmup"] + steps["timed"] <= own_steps
    assert not has_room or steps == wanted
    more = f"so a trial has no more; if it can go on: --steps {wanted['timed']}"
    assert lines == ([] if has_room else [f"the program's loop has {own_steps:,} steps, {more}"])
    if question.expected_s(short) < 3600:
        values["workload"]["code"] = "/srv/lab"
        make_plan(parse_spec(json.dumps(values).encode(), "application/json"))


def test_times_may_be_compared_at_the_seed_of_the_program_and_reports_may_not() -> None:
    question = asked_change(("a",), changes=("--x",))
    own = question.with_own_seed(1337)
    assert own is not None
    assert own.spec()["design"]["seeds"] == [1337]
    assert own.with_own_seed(1337) is None
    assert question.with_own_seed(None) is None
    assert asked_change(("a", "{seed}"), changes=("--x",)).with_own_seed(0) is None
    assert asked_change(("a",), changes=("--x",), metric="loss {}").with_own_seed(0) is None


def test_a_question_without_a_change_is_refused() -> None:
    with pytest.raises(SpecError, match="nothing differs"):
        asked_change(("a",))


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("python train.py --lr 1e-3", "--lr 1e-3"),
        ("python train.py --lr=1e-3 --fused", "--fused"),
        ("python train.py --fused --lr 1e-3", "--lr 1e-3 --fused"),
        ("python train.py lr=1e-3 width=8", "width=8"),
    ],
)
def test_a_change_that_the_command_has_already_is_refused_and_named(command: str, changes: str) -> None:
    with pytest.raises(SpecError, match=f"the command has {changes} already"):
        asked_change(tuple(shlex.split(command)), changes=tuple(shlex.split(changes)))
    asked_change(tuple(shlex.split(command)), changes=tuple(shlex.split(changes)), env={"A": "1"})


def test_a_variant_of_a_commit_has_the_name_that_its_author_gave() -> None:
    asked = asked_change(("a",), commit=40 * "f", revision="origin/fused@{1}")
    assert asked.name == "ask-origin-fused-1"
    assert asked.spec()["variants"] == {"origin-fused-1": {"code": {"commit": 40 * "f"}}}


@pytest.mark.parametrize(
    ("revision", "name"),
    [("v1.2", "v1.2 (ffffffffffff)"), ("fffffff", "commit ffffffffffff"), ("", "commit ffffffffffff")],
)
def test_the_question_names_the_revision_as_typed_and_its_commit(revision: str, name: str) -> None:
    asked = asked_change(("a",), commit=40 * "f", revision=revision)
    assert asked.spec()["question"] == f"Does the code of {name} speed up a?"
    assert [line for _arm, line in asked.command_lines()] == ["a", f"a (code of {name})"]


def test_a_question_is_short_where_paths_are_long() -> None:
    command = ("/lab/.venv/bin/python", "/lab/code/train.py", "--lr", "1")
    question = asked_change(command, changes=("--data", "/data/wiki/train.bin", "--out=/tmp/x/y"))
    assert question.spec()["question"] == "Does --data train.bin --out=y speed up train.py?"
    assert question.name == "ask-data-train-bin-out-y"
    assert question.variants["data-train-bin-out-y"]["args"][-2:] == ["/data/wiki/train.bin", "--out=/tmp/x/y"]
