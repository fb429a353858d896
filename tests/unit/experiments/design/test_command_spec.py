"""Specs whose workload is a command: what they accept, what they refuse and where, and the arms that they make."""

from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
import yaml

from ablate.experiments.design.aa_spec import calibration_spec
from ablate.experiments.design.arms import read_config
from ablate.experiments.design.kinds.command import CommandArm, sent_code
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan, questions
from ablate.experiments.design.rule import rule_of
from ablate.experiments.design.spec import ablation_json_schema
from ablate.experiments.digest import digest
from ablate.experiments.errors import SpecError
from ablate.experiments.reporting.mlflow.content import params
from tests.factories import command_values as values
from tests.factories import spec_values

SCHEMA = jsonschema_rs.Draft202012Validator(ablation_json_schema())


def parse(made: dict[str, Any]) -> Any:
    return parse_spec(yaml.safe_dump(made, sort_keys=False).encode(), "application/yaml")


def problems(made: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        make_plan(parse(made))
    except SpecError as error:
        return [(problem.pointer, problem.detail) for problem in error.problems]
    return []


def test_several_nodes_are_for_programs_without_an_evaluation() -> None:
    made = values(placement__nodes=2)
    assert problems(made) == []
    plan = make_plan(parse(made))
    assert {arm.config.lane() for arm in plan.arms} == {"command*2"}
    one = make_plan(parse(values()))
    assert {arm.config.lane() for arm in one.arms} == {"command"}
    assert all("nodes" not in arm.config.values_with_seed for arm in one.arms)
    assert plan.baseline.digest != one.baseline.digest
    assert plan.baseline.config.shape() == {**one.baseline.config.shape(), "nodes": 2}, "noise of its own"
    evaluated = values(
        placement__nodes=2, workload__evaluate=["python", "judge.py"], workload__metrics={"a": {"better": "lower"}}
    )
    assert ("#/workload/evaluate", "an evaluation reads the files of one node, and this program runs on several") in (
        problems(evaluated)
    )
    ((where, detail),) = problems(spec_values(placement__nodes=3))
    assert (where, detail) == (
        "#/placement/nodes",
        "the built-in model runs on the devices of one node; given: 3 nodes",
    )
    for wrong in (0, 65, "2"):
        assert [where for where, _detail in problems(values(placement__nodes=wrong))] == ["#/placement/nodes"]
        assert list(SCHEMA.iter_errors(values(placement__nodes=wrong)))


def test_arms_are_the_command_with_their_own_arguments_variables_and_code() -> None:
    made = values(
        workload__env={"A": "1"},
        variants={
            "fused": {"args": ["--loss=fused"]},
            "ring": {"env": {"NCCL_ALGO": "Ring"}},
            "other": {"code": "/srv/other"},
        },
    )
    plan = make_plan(parse(made))
    base, fused, ring, other = (arm.config.with_seed(3) for arm in plan.arms)
    assert base.argv(out="/o") == ["python", "train.py", "--seed", "3"]
    assert fused.argv(out="/o") == ["python", "train.py", "--seed", "3", "--loss=fused"]
    assert (base.env, ring.env) == ({"A": "1"}, {"A": "1", "NCCL_ALGO": "Ring"})
    assert (base.code, other.code) == ("/srv/lab", "/srv/other")
    assert plan.arms[1].gates == {"args": "--loss=fused", "code": "/srv/lab", "env.A": "1", "env.NCCL_ALGO": ""}
    assert len(set(questions(parse(made), plan).values())) == 3


def test_names_of_secrets_are_in_every_configuration_and_needed_of_the_node() -> None:
    plan = make_plan(parse(values(workload__secrets=["WANDB_API_KEY", "HF_TOKEN"])))
    for arm in plan.arms:
        assert arm.config.secrets == ("HF_TOKEN", "WANDB_API_KEY")
        assert arm.config.back_ends() == {"secret:HF_TOKEN", "secret:WANDB_API_KEY"}
    without = make_plan(parse(values())).baseline.config.values_with_seed
    assert "secrets" not in without, "stored configurations stay as they are"


def test_a_commit_is_an_arm_of_the_same_repository() -> None:
    made = values(
        workload__code={"git": "/srv/git/lab.git", "commit": "4f2a9c1"},
        variants={"new": {"code": {"commit": "9c1b77e"}}},
    )
    base, new = make_plan(parse(made)).arms
    assert base.config.code == {"git": "/srv/git/lab.git", "commit": "4f2a9c1"}
    assert new.config.code == {"git": "/srv/git/lab.git", "commit": "9c1b77e"}


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"workload__recipe": "hybrid-tiny"}, "#/workload", "exactly one of 'recipe' and 'command'"),
        ({"workload__overrides": {"seq_len": 64}}, "#/workload", "'overrides' change a recipe"),
        ({"workload__steps": {"timed": 4, "slice": 3}}, "#/workload/steps/slice", "an even number of slices of 3"),
        ({"workload__command": []}, "#/workload/command", "at least 1"),
        ({"workload__command": "python train.py"}, "#/workload/command", "must be a list"),
        ({"workload__command": ["python", "{sed}"]}, "#/workload/command/1", "unknown placeholder {sed}"),
        ({"workload__code": "lab"}, "#/workload/code", "folder of the submitter, which nothing has packed"),
        ({"workload__code": "a\nb"}, "#/workload/code", "no folder"),
        ({"workload__code": {"git": ".", "commit": "4f2a9c1"}}, "#/workload/code", "which nothing has packed"),
        ({"workload__code": {"git": 7, "commit": "4f2a9c1"}}, "#/workload/code", "git is 7"),
        ({"workload__code": {"archive": "sha256:12"}}, "#/workload/code", "64 hexadecimal digits"),
        ({"variants": {"x": {"code": "./src"}}}, "#/variants/x/code", "folder of the submitter"),
        ({"workload__code": {"git": "/srv/x", "commit": "main"}}, "#/workload/code", "a branch may move"),
        ({"workload__code": 3}, "#/workload/code", "an absolute folder on the node"),
        ({"workload__env": {"ABLATE_TOKEN": "x"}}, "#/workload/env/ABLATE_TOKEN", "belongs to the worker"),
        ({"workload__env": {"CUDA_VISIBLE_DEVICES": "1"}}, "#/workload/env/CUDA_VISIBLE_DEVICES", "belongs to"),
        ({"workload__secrets": ["A", "A"]}, "#/workload/secrets/1", "named twice"),
        ({"workload__secrets": ["HF-TOKEN"]}, "#/workload/secrets/0", "the name of a variable, such as HF_TOKEN"),
        ({"workload__secrets": ["PYTHONPATH"]}, "#/workload/secrets/0", "belongs to the worker"),
        ({"workload__secrets": "HF_TOKEN"}, "#/workload/secrets", "must be a list"),
        ({"workload__secrets": [f"S{i}" for i in range(17)]}, "#/workload/secrets", "at most 16"),
        (
            {"workload__secrets": ["A"], "variants": {"x": {"env": {"A": "1"}}}},
            "#/variants/x/env/A",
            "one of workload.secrets",
        ),
        ({"workload__secrets": ["A"], "workload__env": {"A": "1"}}, "#/workload/env/A", "one of workload.secrets"),
        ({"workload__env": {"1A": "x"}}, "#/workload/env/1A", "not beginning with a digit"),
        ({"workload__env": {"A": "a\nb"}}, "#/workload/env/A", "control character"),
        ({"workload__metrics": {"Val": {"better": "lower"}}}, "#/workload/metrics/Val", "metric name"),
        ({"workload__metrics": {"val": {"better": "less"}}}, "#/workload/metrics/val/better", "higher, lower"),
        ({"baseline": {"gates": {"chunk_size": 16}}}, "#/baseline/gates", "gates belong to recipes"),
        ({"variants": {"x": {"gates": {"chunk_size": 16}}}}, "#/variants/x/gates", "gates belong to recipes"),
        ({"variants": {"x": {}}}, "#/variants/x", "it has none"),
        ({"variants": {"x": {"args": ["a"], "gates": {"chunk_size": 16}}}}, "#/variants/x", "give one of them"),
        ({"variants": {"x": {"args": []}}}, "#/variants/x", "the same configuration as the baseline"),
        ({"variants": {"x": {"code": {"commit": "9c1b77e"}}}}, "#/variants/x/code", "needs workload.code"),
        ({"placement": {"node_class": "tpu-v6e"}}, "#/placement/node_class", "commands do not run"),
        ({"placement": {"node_class": "cpu", "devices": 2}}, "#/placement/devices", "'cpu'; allowed: 1"),
        ({"placement": {"node_class": "h200", "devices": 9}}, "#/placement/devices", "allowed: 1, 2, 3"),
        (
            {"verdict__require": [{"metric": "peak_driver_gib", "max_value": 8}]},
            "#/verdict/require/0/metric",
            "which has no GPU",
        ),
        (
            {"verdict": {"primary": {"metric": "compile_s", "margin": "1%"}}},
            "#/verdict/primary/metric",
            "not measured of a command",
        ),
        (
            {"verdict": {"primary": {"metric": "peak_allocated_gib", "margin": "1%"}}},
            "#/verdict/primary/metric",
            "resident set",
        ),
    ],
)
def test_a_wrong_command_is_refused_with_its_place(changes: dict[str, Any], where: str, words: str) -> None:
    refused = problems(values(**changes))
    assert [pointer for pointer, _detail in refused] == [where], refused
    assert words in refused[0][1]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"workload__code": "/srv/lab"}, "#/workload"),
        ({"workload__env": {"A": "1"}}, "#/workload"),
        ({"baseline__args": ["a"]}, "#/baseline/args"),
        ({"variants": {"x": {"args": ["a"]}}}, "#/variants/x"),
        ({"placement": {"node_class": "h100", "devices": 5}, "baseline": {}}, "#/placement/devices"),
    ],
)
def test_a_recipe_takes_nothing_of_a_command(changes: dict[str, Any], where: str) -> None:
    assert [pointer for pointer, _detail in problems(spec_values(**changes))] == [where]


def test_the_schema_agrees_about_recipes_and_commands() -> None:
    assert SCHEMA.is_valid(values())
    assert SCHEMA.is_valid(spec_values())
    assert SCHEMA.is_valid(values(workload__code=".")), "an editor sees the file before its folder is packed"
    for wrong in (
        values(workload__recipe="hybrid-tiny"),
        values(workload__overrides={"seq_len": 64}),
        values(workload__code={"archive": "lab"}),
        values(variants={"x": {}}),
        spec_values(workload__code="/srv/lab"),
    ):
        assert not SCHEMA.is_valid(wrong)


def test_sent_code_is_named_with_its_places_and_shown_short() -> None:
    first, second = (f"sha256:{letter * 64}" for letter in "ab")
    spec = parse(
        values(workload__code={"archive": first}, variants={"b": {"code": {"archive": second}}, "c": {"code": "/x"}})
    )
    assert sent_code(spec) == {"#/workload/code": first, "#/variants/b/code": second}
    plan = make_plan(spec)
    assert [arm.gates["code"] for arm in plan.arms] == [first[:19], second[:19], "/x"]
    assert plan.arms[0].config.with_seed(1).code == {"archive": first}


def test_a_calibration_repeats_the_baseline_of_a_command() -> None:
    spec = parse(values(baseline={"args": ["--width=4"], "env": {"A": "1"}}, workload__env={"B": "2"}))
    calibration = parse_spec(calibration_spec(spec, node_class="cpu", blocks=20, order_seed=1), "application/yaml")
    base, repeat = make_plan(calibration).arms
    assert base.digest == repeat.digest
    assert base.config == make_plan(spec).arms[0].config


def test_the_deciding_metric_says_which_marks_are_needed() -> None:
    needs = {
        metric: make_plan(parse(values(verdict={"primary": {"metric": metric, "margin": "1%"}}))).baseline.config.needs
        for metric in ("tokens_per_s", "step_s", "process_s", "cpu_s")
    }
    assert needs == {"tokens_per_s": "tokens", "step_s": "steps", "process_s": "process", "cpu_s": "process"}


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (["bash", "-c", "python train.py | tee log"], True),
        (["/bin/sh", "-ec", "python train.py 2>&1|tee log"], True),
        (["env", "A=1", "bash", "-lc", "python train.py |& tee log"], True),
        (["bash", "-o", "pipefail", "-c", "python train.py | tee log"], False),
        (["bash", "-c", "set -o pipefail; python train.py | tee log"], False),
        (["bash", "-c", "python train.py || exit 3"], False),
        (["bash", "-c", "python train.py --pattern 'a|b'"], False),
        (["bash", "-c", "python 'train.py"], False),
        (["bash", "run.sh", "a|b"], False),
        (["python", "train.py", "|"], False),
        (["bash", "-c"], False),
    ],
)
def test_a_pipe_that_hides_a_failure_may_not_decide_by_the_time_of_the_process(
    command: list[str],
    refused: bool,
) -> None:
    timed = values(workload__command=command, verdict={"primary": {"metric": "process_s", "margin": "1%"}})
    assert [where for where, _detail in problems(timed)] == ["#/workload/command"] * refused
    marked = values(workload__command=command, verdict={"primary": {"metric": "step_s", "margin": "1%"}})
    assert problems(marked) == [], "the marks show whether it trained"


def test_json_of_a_configuration_is_read_back_and_a_strange_field_is_refused() -> None:
    config = CommandArm(
        command=("a", "b"), env={"A": "1"}, code={"git": "/g", "commit": "abcdef1"}, environment="lab", seed=3
    )
    values_of = config.values_with_seed
    assert read_config(values_of) == config
    assert (config.lane(), replace(config, environment=None).lane()) == ("command:lab", "command")
    for strange in ({"more": 1}, {"devices": "1"}, {"steps": {"timed": 3, "more": 1}}):
        with pytest.raises(ValueError, match=next(iter(strange))):
            read_config({**values_of, **strange})


def test_json_of_earlier_code_lacks_later_fields_and_is_still_read() -> None:
    """A receipt that was written before a field existed verifies for ever."""
    config = CommandArm(command=("a",), seed=3)
    for name in config.values_with_seed.keys() - {"command", "seed"}:
        earlier = {field: value for field, value in config.values_with_seed.items() if field != name}
        assert read_config(earlier) == config


DECLARED: dict[str, Any] = {
    "workload__metrics": {"val_bpb": {"better": "lower"}, "accuracy": {"better": "higher"}},
    "design__seeds": [1, 2, 3, 4, 5, 6],
    "design__blocks": {"count": 6},
}


def declared(**changes: Any) -> dict[str, Any]:
    return values(**{**DECLARED, "verdict__primary": {"metric": "val_bpb", "margin": "0.5%"}, **changes})


def test_a_declared_metric_decides_and_bounds_without_marks() -> None:
    made = declared(verdict__require=[{"metric": "accuracy", "not_worse_by": "1%"}])
    spec = parse(made)
    plan = make_plan(spec)
    SCHEMA.validate(made)
    assert (spec.metric.better, spec.metric.decides, plan.timed) == ("lower", "paired", True)
    assert plan.baseline.config.needs == "process"
    rule = rule_of(spec)
    assert rule["primary"] == {"metric": "val_bpb", "margin_pct": 0.5, "adopt_if_pct": 0.5, "better": "lower"}
    assert rule["require"] == [{"metric": "accuracy", "not_worse_by": "1%", "better": "higher"}]
    assert {"seeds", "not_inferior"} <= rule["comparison"].keys()
    again = parse_spec(calibration_spec(spec, node_class="cpu", blocks=20, order_seed=1), "application/yaml")
    assert again.verdict.primary.metric == "val_bpb"
    assert make_plan(again).blocks[-1].index == 19
    other = parse(declared(workload__metrics={"val_bpb": {"better": "higher"}}))
    assert make_plan(other).rule_digest != plan.rule_digest


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"verdict__primary__metric": "val_bbp"}, "#/verdict/primary/metric", "cannot be primary"),
        ({"verdict__primary__metric": "custom_calls"}, "#/verdict/primary/metric", "cannot be primary"),
        ({"verdict__primary__metric": "No such"}, "#/verdict/primary/metric", "cannot be primary"),
        ({"verdict__primary__margin": "0%"}, "#/verdict/primary/margin", "above 0%"),
        ({"workload__metrics": {"loss_val": {"better": "lower"}}}, "#/workload/metrics/loss_val", "metric of Ablate"),
        ({"verdict__require": [{"metric": "nothing", "not_worse_by": "1%"}]}, "#/verdict/require/0/metric", "cannot"),
        ({"verdict__require": [{"metric": "val_bpb", "max_delta": 1}]}, "#/verdict/require/0", "a test decides"),
        ({"verdict__require": [{"metric": "val_bpb", "rule": "identical"}]}, "#/verdict/require/0", "a test decides"),
        ({"verdict__require": [{"metric": "compile_s", "not_worse_by": "1%"}]}, "#/verdict/require/0", "is for losses"),
        ({"verdict__require": [{"metric": "val_bpb"}]}, "#/verdict/require/0", "exactly one of"),
        ({"design__seeds": [1, 2]}, "#/design/seeds", "2 seeds for 6 blocks"),
        ({"design__blocks": {"looks": [6, 8]}}, "#/design/seeds", "6 seeds for 8 blocks"),
        (
            {"design__seeds": [1], "verdict__primary__metric": "step_s", "verdict__require": [
                {"metric": "val_bpb", "not_worse_by": "1%"}]},
            "#/design/seeds",
            "1 seeds for 6 blocks",
        ),
    ],
)  # fmt: skip
def test_a_declared_metric_that_cannot_be_judged_is_refused_where_it_stands(
    changes: dict[str, Any], where: str, words: str
) -> None:
    refused = problems(declared(**changes))
    assert any(at == where and words in detail for at, detail in refused), refused


def test_a_recipe_declares_no_metric() -> None:
    made = spec_values(verdict__primary={"metric": "val_bpb", "margin": "0.5%"})
    assert [at for at, _ in problems(made)] == ["#/verdict/primary/metric"]
    assert not SCHEMA.is_valid(made)
    assert SCHEMA.is_valid(declared())
    assert not SCHEMA.is_valid(declared(verdict__primary={"metric": "val_bpb", "margin": "0%"}))
    assert not SCHEMA.is_valid(declared(verdict__require=[{"metric": "val_bpb", "max_delta": 1.0}]))
    assert not SCHEMA.is_valid(declared(workload__metrics={"loss_val": {"better": "lower"}}))


def test_a_required_kernel_implies_a_profiled_step_and_belongs_to_its_arm() -> None:
    made = values(workload__require_kernels={"fused": "liger_.*"})
    SCHEMA.validate(made)
    plan = make_plan(parse(made))
    base, fused = (arm.config.with_seed(1) for arm in plan.arms)
    assert (base.profile, fused.profile) == (True, True)
    assert (base.required_kernels, fused.required_kernels) == ({}, {"liger_.*": None})
    assert "required_kernels" not in plan.baseline.config.values_with_seed
    assert not plan.profile
    again = parse_spec(calibration_spec(parse(made), node_class="cpu", blocks=20, order_seed=1), "application/yaml")
    assert not again.workload.require_kernels
    assert make_plan(again).baseline.digest == plan.baseline.digest
    both = values(workload__require_kernels={"baseline": "gemm"})
    again = parse_spec(calibration_spec(parse(both), node_class="cpu", blocks=20, order_seed=1), "application/yaml")
    assert again.workload.require_kernels == {"baseline": "gemm", "repeat": "gemm"}
    make_plan(again)


def test_calls_of_kernels_and_code_paths_belong_to_their_arms() -> None:
    calls, paths = {"flash_.*": 28, "gemm_naive": 0}, {"fused rope": True, "slow": False}
    made = values(workload__require_kernels={"fused": calls}, workload__require_live={"baseline": paths})
    SCHEMA.validate(made)
    base, fused = (arm.config.with_seed(1) for arm in make_plan(parse(made)).arms)
    assert (base.required_kernels, fused.required_kernels) == ({}, calls)
    assert (base.required_live, fused.required_live) == (paths, {})
    again = parse_spec(calibration_spec(parse(made), node_class="cpu", blocks=20, order_seed=1), "application/yaml")
    assert again.workload.require_live == {"baseline": paths, "repeat": paths}


@pytest.mark.parametrize(
    ("paths", "where"),
    [
        ({"fusde": {"a": True}}, "#/workload/require_live/fusde"),
        ({"fused": {"a": "yes"}}, "#/workload/require_live/fused/a"),
        ({"fused": {"a" * 64: True}}, "#/workload/require_live/fused/" + "a" * 64),
        ({"fused": {"": True}}, "#/workload/require_live/fused/"),
        ({"fused": {"a\nb": True}}, "#/workload/require_live/fused/a%0Ab"),
        ({"fused": {}}, "#/workload/require_live/fused"),
        ({"fused": ["a"]}, "#/workload/require_live/fused"),
    ],
)
def test_a_bad_name_of_a_code_path_is_refused(paths: dict[str, Any], where: str) -> None:
    assert [at for at, _ in problems(values(workload__require_live=paths))] == [where]


@pytest.mark.parametrize(
    ("patterns", "where", "words"),
    [
        ({"fusde": "liger"}, "#/workload/require_kernels/fusde", "arms: baseline, fused"),
        ({"fused": "(a+"}, "#/workload/require_kernels/fused", "missing )"),
        ({"fused": ".*"}, "#/workload/require_kernels/fused", "matches the empty text"),
        ({"fused": "a" * 121}, "#/workload/require_kernels/fused", "120"),
        ({"fused": ""}, "#/workload/require_kernels/fused", "0 characters; allowed: 1 to 120"),
        ({"fused": r"(a)\1"}, "#/workload/require_kernels/fused", "invalid escape"),
        ({"fused": 3}, "#/workload/require_kernels/fused", "3 is not allowed; allowed: a pattern, or {pattern: "),
        ({"fused": {"flash": True}}, "#/workload/require_kernels/fused", "number of calls in a step, from 0 to 1,000"),
        ({"fused": {"flash": -1}}, "#/workload/require_kernels/fused", "number of calls"),
        ({"fused": {}}, "#/workload/require_kernels/fused", "0 patterns; allowed: 1 to 16"),
        ({"fused": {"flash": 1, "(a": 0}}, "#/workload/require_kernels/fused", "missing )"),
        ({"No such": "a"}, "#/workload/require_kernels/No%20such", "name"),
    ],
)
def test_a_bad_pattern_and_an_unknown_arm_are_refused(patterns: dict[str, Any], where: str, words: str) -> None:
    refused = problems(values(workload__require_kernels=patterns))
    assert any(at == where and words in detail for at, detail in refused), refused


def test_a_recipe_may_be_profiled_where_torch_sees_its_kernels() -> None:
    made = spec_values(workload__profile=True)
    SCHEMA.validate(made)
    plan, plain = make_plan(parse(made)), make_plan(parse(spec_values()))
    assert (plan.profile, plain.profile) == (True, False)
    assert plan.arms == plain.arms
    assert "profile" not in plain.model_dump(mode="json")
    assert [at for at, _ in problems(spec_values(workload__require_kernels={"psiv-on": "a"}))] == ["#/workload"]
    for node_class, words in (("tpu-v6e", "XLA"), ("tpu-v6e-compile", "executes nothing")):
        refused = problems(spec_values(workload__profile=True, placement__node_class=node_class))
        assert any(at == "#/workload/profile" and words in detail for at, detail in refused), (node_class, refused)


JUDGE = ["python", "judge.py"]
ARCHIVES = [{"archive": f"sha256:{number * 64}"} for number in "123"]


@pytest.mark.parametrize("own", [None, ARCHIVES[2], "/srv/judging", {"git": "/srv/git", "commit": "4f2a9c1"}])
def test_an_evaluation_is_that_of_the_workload_in_every_arm(own: Any) -> None:
    variants = {
        "code": {"code": ARCHIVES[1]},
        "all": {"args": ["--x"], "env": {"A": "2", "B": "3"}, "code": "/srv/other"},
        "args": {"args": ["--evaluate"]},
    }
    evaluate = JUDGE if own is None else {"command": JUDGE, "code": own}
    made = declared(
        workload__code=ARCHIVES[0],
        workload__env={"A": "1"},
        workload__evaluate=evaluate,
        workload__secrets=["HF_TOKEN"],
        baseline={"env": {"C": "4"}},
        variants=variants,
    )
    SCHEMA.validate(made)
    arms = [arm.config for arm in make_plan(parse(made)).arms]
    judges = [config.judge for config in arms if isinstance(config, CommandArm)]
    assert len(judges) == 4
    for one in judges:
        assert one is not None
        assert (one.argv(out="/o"), one.env, one.code) == (JUDGE, {"A": "1"}, own or ARCHIVES[0])
        assert (one.secrets, one.needs, one.judge) == (("HF_TOKEN",), "process", None)
    for config in arms:
        assert read_config(config.values_with_seed) == config
        codes = [one["archive"] for one in (config.code, own or ARCHIVES[0]) if one in ARCHIVES]
        assert config.archives == set(codes)


def test_both_ways_to_write_an_evaluation_are_one_spec() -> None:
    short, long = (parse(declared(workload__evaluate=one)) for one in (JUDGE, {"command": JUDGE}))
    assert short == long
    assert short.digest == long.digest
    assert "evaluate" not in parse(declared()).model_dump(mode="json")["workload"]
    again = parse_spec(calibration_spec(short, node_class="cpu", blocks=20, order_seed=1), "application/yaml")
    assert again.workload.evaluate == short.workload.evaluate


def test_another_evaluation_is_another_question_with_another_noise() -> None:
    plans = [
        make_plan(parse(declared(**changes)))
        for changes in (
            {},
            {"workload__evaluate": JUDGE},
            {"workload__evaluate": ["python", "other.py"]},
            {"workload__evaluate": {"command": JUDGE, "code": "/srv/judging"}},
        )
    ]
    assert len({digest(plan.baseline.config.content()) for plan in plans}) == 4
    assert len({digest(plan.baseline.config.shape()) for plan in plans}) == 3, "the code does not matter"


def test_the_archives_of_an_evaluation_are_named_and_hidden_where_everybody_reads() -> None:
    evaluate = {"command": JUDGE, "code": ARCHIVES[2]}
    spec = parse(declared(workload__code=ARCHIVES[0], workload__evaluate=evaluate))
    assert sent_code(spec) == {
        "#/workload/code": ARCHIVES[0]["archive"],
        "#/workload/evaluate/code": ARCHIVES[2]["archive"],
    }
    shown = params(make_plan(spec).baseline)
    assert shown["config.evaluate.code.archive"] == ARCHIVES[2]["archive"][:19]
    assert not any(ARCHIVES[2]["archive"] in value for value in shown.values())


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"workload__evaluate": "python judge.py"}, "#/workload/evaluate", "a list, such as [python, judge.py]"),
        ({"workload__evaluate": 7}, "#/workload/evaluate", "a list, such as [python, judge.py]"),
        ({"workload__evaluate": []}, "#/workload/evaluate/command", "at least 1"),
        ({"workload__evaluate": ["python", "{sed}"]}, "#/workload/evaluate/command/1", "unknown placeholder {sed}"),
        ({"workload__evaluate": {"code": "/srv/x"}}, "#/workload/evaluate/command", "is missing"),
        ({"workload__evaluate": {"command": JUDGE, "env": {}}}, "#/workload/evaluate/env", "known: command, code"),
        (
            {"workload__evaluate": {"command": JUDGE, "code": {"commit": "9c1b77e"}}},
            "#/workload/evaluate/code",
            "allowed: a folder",
        ),
        (
            {"workload__evaluate": {"command": JUDGE, "code": "judging"}},
            "#/workload/evaluate/code",
            "which nothing has packed and sent",
        ),
        ({"workload__evaluate": JUDGE, "workload__metrics": {}}, "#/workload/evaluate", "declares none"),
        ({"workload__evaluate": ["bash", "-c", "a | tee b"]}, "#/workload/evaluate", "is not seen"),
        ({"workload__evaluate": ["python", "--key=hf_" + "a" * 34]}, "#/workload/evaluate/command/1", "looks like"),
        ({"workload__evaluate": JUDGE, "workload": {"command": ["a"]}}, "#/workload/evaluate", "there is none"),
        (
            {"workload__evaluate": JUDGE, "verdict__primary": {"metric": "loss_final", "margin": "0.01 nats"}},
            "#/verdict/primary/metric",
            "loss_final decides, which the program itself says",
        ),
        (
            {"workload__evaluate": JUDGE, "variants": {"x": {"args": ["a"], "evaluate": ["judge"]}}},
            "#/variants/x/evaluate",
            "unknown key 'evaluate'",
        ),
        ({"workload__evaluate": JUDGE, "baseline": {"evaluate": ["judge"]}}, "#/baseline/evaluate", "unknown key"),
    ],
)
def test_an_evaluation_that_would_protect_nothing_is_refused_where_it_stands(
    changes: dict[str, Any], where: str, words: str
) -> None:
    if "workload" in changes:
        made = declared(workload__evaluate=JUDGE)
        del made["workload"]["code"]
    else:
        made = declared(**changes) if changes.get("workload__metrics") != {} else values(workload__evaluate=JUDGE)
    refused = problems(made)
    assert any(at == where and words in detail for at, detail in refused), refused


def test_a_recipe_has_no_evaluation() -> None:
    made = spec_values(workload__evaluate=JUDGE)
    assert [at for at, _ in problems(made)] == ["#/workload"]
    assert not SCHEMA.is_valid(made)


def test_speed_may_decide_beside_an_evaluation_that_bounds() -> None:
    primary = {"metric": "tokens_per_s", "margin": "1%"}
    bound = [{"metric": "val_bpb", "not_worse_by": "1%"}]
    assert problems(declared(workload__evaluate=JUDGE, verdict__primary=primary, verdict__require=bound)) == []
