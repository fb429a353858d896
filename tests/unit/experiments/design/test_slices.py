"""Slices in a spec: the order in which they run, what is refused, and where they count."""

import random
from typing import Any

import pytest
from pydantic import ValidationError

from ablate.experiments.analysis.noise.calibrate import estimator_digest
from ablate.experiments.design.aa_spec import CONTENT_TYPE, calibration_spec
from ablate.experiments.design.arms import resolve
from ablate.experiments.design.kinds.kind import MAX_TRIALS
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan, questions, running_order
from ablate.experiments.design.rule import rule_digest, rule_of, window_estimator
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import digest
from ablate.experiments.errors import SpecError
from ablate.experiments.reporting.pages.circumstance_tables import rule_in_words
from tests.factories import make_spec

STEPS = {"warmup": 1, "warmup_s": 0, "timed": 12, "val_rows": 2}


def sliced(size: int = 3, **changes: Any) -> AblationSpec:
    return make_spec(workload={"recipe": "hybrid-tiny", "steps": {**STEPS, "slice": size}}, **changes)


def test_order_goes_through_the_block_and_back_and_shares_every_linear_drift() -> None:
    chance = random.Random(13)  # noqa: S311 - reproducible by design
    for _ in range(100):
        trials, slices = list(range(chance.randint(1, 8))), 2 * chance.randint(1, 20)
        order = list(running_order(trials, slices))
        assert sorted(order) == [(number, trial) for number in range(slices) for trial in trials]
        places = {trial: [at for at, (_, one) in enumerate(order) if one == trial] for trial in trials}
        assert len({sum(own) for own in places.values()}) == 1
        assert [trial for _, trial in order[: len(trials)]] == trials


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "h200": (
        {"workload__recipe": "hybrid-ref-h200", "placement__node_class": "h200"},
        "cannot take turns on node class 'h200': a trial has the device to itself there",
    ),
    "tpu": ({"workload__recipe": "hybrid-ref-v6e", "placement__node_class": "tpu-v6e"}, "on node class 'tpu-v6e'"),
    "compiler": (
        {"workload__recipe": "hybrid-ref-v6e", "placement__node_class": "tpu-v6e-compile"},
        "on node class 'tpu-v6e-compile': that class executes nothing",
    ),
    "devices": ({"placement": {"node_class": "xla-cpu", "devices": 4}}, "on one device; this spec has 4"),
    "odd": ({"workload__steps__slice": 4}, "an even number of slices of 4"),
    "whole": ({"workload__steps__slice": 12}, "an even number of slices of 12"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_in_slices_is_refused_with_the_reason(what: str) -> None:
    changes, words = REFUSED[what]
    spec = make_spec(**{"workload__steps": {**STEPS, "slice": 3}, **changes})
    with pytest.raises(SpecError) as refused:
        make_plan(spec)
    problems = [problem for problem in refused.value.problems if problem.pointer == "#/workload/steps/slice"]
    assert len(problems) == 1
    assert words in problems[0].detail
    assert problems[0].hint


def test_more_arms_than_may_be_in_memory_are_refused() -> None:
    gates = [{"chunk_size": size, "psiv_cache": cache} for size in (8, 16, 32, 64) for cache in (False, True)]
    variants = {
        f"v{number}": {"gates": {"schedule": "chunk_parallel", **own}} for number, own in enumerate(gates, start=1)
    }
    few = {name: variant for name, variant in variants.items() if name != f"v{MAX_TRIALS}"}
    baseline = {"gates": {"schedule": "sequential"}}
    assert not resolve(sliced(variants=few, baseline=baseline)).problems
    (problem,) = resolve(sliced(variants=variants, baseline=baseline)).problems
    assert "9 arms would be in memory together; allowed with turns: 8" in problem.detail


def command(**changes: Any) -> AblationSpec:
    steps = {"warmup": 1, "timed": 12, "slice": 3}
    values = {"workload": {"command": ["python", "train.py"], "code": "/srv/lab", "steps": steps}, "baseline": {}}
    rule = {"primary": {"metric": "cpu_step_s", "margin": "1%"}}
    variants = {"fused": {"args": ["--fused"]}}
    return make_spec(**{**values, "variants": variants, "verdict": rule, **changes})


REFUSED_OF_COMMANDS: dict[str, tuple[dict[str, Any], str]] = {
    "gpu": (
        {"placement": {"node_class": "h200"}},
        "cannot take turns on node class 'h200': a trial has the device to itself there",
    ),
    "any gpu": (
        {"placement": {"node_class": "gpu-nvidia-a100-sxm4-80gb"}},
        "on node class 'gpu-nvidia-a100-sxm4-80gb'",
    ),
    "nodes": ({"placement": {"node_class": "cpu", "nodes": 2}}, "on one node; this spec has 2"),
    "odd": ({"workload__steps__slice": 4}, "an even number of slices of 4"),
    "process": (
        {"verdict__primary__metric": "process_s"},
        "process_s is a number of the whole process: the turns of the others are in it",
    ),
    "work of the process": ({"verdict__primary__metric": "cpu_s"}, "cpu_s is a number of the whole process"),
    "reported": (
        {"workload__metrics": {"rate": {"better": "higher"}}, "verdict__primary__metric": "rate"},
        "rate is reported by the program: the turns of the others are in it",
    ),
    "many arms": (
        {"variants": {f"v{number}": {"args": [f"--x={number}"]} for number in range(MAX_TRIALS)}},
        "9 arms would be in memory together",
    ),
}


@pytest.mark.parametrize("what", REFUSED_OF_COMMANDS)
def test_commands_that_cannot_take_turns_are_refused_with_the_reason(what: str) -> None:
    changes, words = REFUSED_OF_COMMANDS[what]
    problems = resolve(command(**changes)).problems
    texts = [one.detail for one in problems if one.pointer == "#/workload/steps/slice"]
    assert len(texts) == 1, problems
    assert words in texts[0]


def test_a_program_that_is_killed_and_resumed_takes_no_turns() -> None:
    own = {"variants": {"resumed": {"resume_at": 3}}, "verdict__primary": {"metric": "loss_final", "margin": "0%"}}
    words = "a program is killed and started again in one go, without turns of other trials"
    assert [problem.detail for problem in resolve(command(**own)).problems] == [words]
    problems = {problem.detail: problem.hint for problem in resolve(process(**own)).problems}
    assert problems[words] == "leave workload.turns out"


def test_processor_time_of_steps_is_measured_on_one_node() -> None:
    own = {"placement": {"node_class": "cpu", "nodes": 2}, "workload__steps__slice": 0}
    (problem,) = resolve(command(**own)).problems
    assert (problem.pointer, problem.hint) == ("#/verdict/primary/metric", "use cpu_s")
    assert not resolve(command(workload__steps__slice=0)).problems


def test_trials_of_commands_take_turns_and_their_processor_time_has_noise_of_its_own() -> None:
    spec, whole, by_time = command(), command(workload__steps__slice=0), command(verdict__primary__metric="step_s")
    configs = [make_plan(one).baseline.config for one in (spec, whole)]
    assert [len(config.steps.slices) for config in configs] == [4, 1]
    assert configs[0].steps.slice == 3
    names = ("cpu_step_s", "cpu_s", "step_s", "tokens_per_s")
    keys = {(estimator_digest(config, name), name) for config in configs for name in names}
    assert len({key for key, _name in keys}) == 5, "cpu_s has no window; step_s and tokens_per_s share theirs"
    assert len({rule_digest(one) for one in (spec, whole, by_time)}) == 3
    assert "3 timed steps at a time" in rule_in_words(rule_of(spec))
    assert "processor seconds" in str(rule_of(spec)["estimator"])
    aa = parse_spec(calibration_spec(spec, node_class="cpu", blocks=20, order_seed=1), CONTENT_TYPE)
    own = make_plan(aa).baseline.config
    assert estimator_digest(own, "cpu_step_s") == estimator_digest(configs[0], "cpu_step_s")


def process(**changes: Any) -> AblationSpec:
    """Return a spec whose trials take turns by the clock."""
    return command(**{"workload__steps": {}, "workload__turns": True, "verdict__primary__metric": "cpu_s", **changes})


REFUSED_OF_PROCESSES: dict[str, tuple[dict[str, Any], str]] = {
    "gpu": (
        {"placement": {"node_class": "h200"}},
        "cannot take turns on node class 'h200': a trial has the device to itself there",
    ),
    "nodes": ({"placement": {"node_class": "cpu", "nodes": 2}}, "on one node; this spec has 2"),
    "steps": ({"verdict__primary__metric": "step_s"}, "step_s is of marked steps"),
    "slices, too": (
        {"workload__steps": {"timed": 12, "slice": 3}, "verdict__primary__metric": "cpu_step_s"},
        "cpu_step_s is of marked steps, between which trials take turns by workload.steps.slice",
    ),
    "reported": (
        {"workload__metrics": {"rate": {"better": "higher"}}, "verdict__primary__metric": "rate"},
        "rate is reported by the program, whose own clock has the turns of the others in it",
    ),
    "time": ({"verdict__primary__metric": "process_s"}, "process_s has waits in it, for example for a"),
    "time is required": (
        {"verdict__require": [{"metric": "process_s", "max_delta": 1}]},
        "process_s has waits in it",
    ),
    "many arms": (
        {"variants": {f"v{number}": {"args": [f"--x={number}"]} for number in range(MAX_TRIALS)}},
        "9 arms would be in memory together",
    ),
}


@pytest.mark.parametrize("what", REFUSED_OF_PROCESSES)
def test_processes_that_cannot_take_turns_are_refused_with_the_reason(what: str) -> None:
    changes, words = REFUSED_OF_PROCESSES[what]
    problems = resolve(process(**changes)).problems
    (problem,) = [one for one in problems if one.pointer == "#/workload/turns"]
    assert words in problem.detail
    assert problem.hint


def test_a_recipe_takes_its_turns_by_steps() -> None:
    with pytest.raises(ValidationError, match="'turns' belongs to a command"):
        make_spec(workload={"recipe": "hybrid-tiny", "turns": True})


def test_turns_of_processes_are_part_of_rule_plan_and_calibration_key_and_not_of_the_question() -> None:
    specs = [process(workload__turns=turns) for turns in (False, True)]
    plans = [make_plan(spec) for spec in specs]
    assert [plan.baseline.config.takes_turns for plan in plans] == [False, True]
    keys = [estimator_digest(plan.baseline.config, spec.verdict.primary.metric)
            for spec, plan in zip(specs, plans, strict=True)]  # fmt: skip
    assert len(set(keys)) == len({rule_digest(spec) for spec in specs}) == 2
    assert len({plan.baseline.digest for plan in plans}) == 2
    assert questions(specs[0], plans[0]) == questions(specs[1], plans[1])
    aa = parse_spec(calibration_spec(specs[1], node_class="cpu", blocks=20, order_seed=1), CONTENT_TYPE)
    assert estimator_digest(make_plan(aa).baseline.config, "cpu_s") == keys[1]
    assert ["half a second at a time" in rule_in_words(rule_of(spec)) for spec in specs] == [False, True]


def test_slices_are_part_of_rule_plan_and_calibration_key_and_not_of_the_question() -> None:
    plain, three, two = make_spec(workload={"recipe": "hybrid-tiny", "steps": STEPS}), sliced(), sliced(2)
    assert len({rule_digest(spec) for spec in (plain, three, two)}) == 3
    plans = [make_plan(spec) for spec in (plain, three, two)]
    assert len({plan.baseline.digest for plan in plans}) == 3
    keys = [estimator_digest(plan.baseline.config, "tokens_per_s") for plan in plans]
    assert len(set(keys)) == 3
    assert "slice" not in rule_of(plain)["estimator"]
    asked = [questions(spec, plan) for spec, plan in zip((plain, three, two), plans, strict=True)]
    assert asked[0] == asked[1] == asked[2]


def test_a_window_in_one_go_has_the_key_that_it_had_before_slices_were_known() -> None:
    config = make_plan(make_spec()).baseline.config
    steps = {name: config.values_with_seed["steps"][name] for name in ("warmup", "warmup_s", "timed")}
    assert estimator_digest(config, "tokens_per_s") == digest({"estimator": window_estimator(0), "steps": steps})


def test_noise_is_measured_in_the_same_slices() -> None:
    text = calibration_spec(sliced(), node_class="cpu", blocks=20, order_seed=1)
    aa = parse_spec(text, CONTENT_TYPE)
    assert aa.workload.steps.slice == 3
    key = estimator_digest(make_plan(aa).baseline.config, "tokens_per_s")
    assert key == estimator_digest(make_plan(sliced()).baseline.config, "tokens_per_s")


def test_the_report_says_how_it_was_measured() -> None:
    assert "3 timed steps at a time" in rule_in_words(rule_of(sliced()))
    assert "at a time" not in rule_in_words(rule_of(make_spec()))
