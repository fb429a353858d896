"""Trials of recipes of packages: the program attests its gates, and what it does not prove is no measurement."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.design.kinds.package import PackageArm
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.program_report import report_contradictions
from ablate.workers.trials.result import TrialResult
from tests.factories import spec_values
from tests.own_packages import OwnPackages, declared, own_packages
from tests.programs import ran

__all__ = ["own_packages"]

TOKENS = 'RECIPE["tokens_per_step"] = lambda config: config["width"]'


def config_of(variant: str = "b", **gates: Any) -> PackageArm:
    workload = {"recipe": "mine", "steps": {"warmup": 1, "timed": 3}}
    plain = spec_values(workload=workload, baseline={}, variants={variant: {"gates": gates or {"kind": "b"}}})
    arm = make_plan(parse_spec(json.dumps(plain).encode(), "application/json")).arms[1]
    return arm.config.with_seed(5)


def run(own_packages: OwnPackages, tmp_path: Path, training: str) -> tuple[PackageArm, TrialResult]:
    folder = own_packages.add("mine", declared("mine", TOKENS), training)
    config = config_of()
    return config, ran(replace(config, env={"PYTHONPATH": str(folder.parent)}), tmp_path / "home")


def loop(*after: str, tokens: str = 'config["width"]') -> str:
    lines = [f"    {line}" for line in after]
    steps = f"    for step in trial.steps():\n        step.report(loss=1.0, tokens={tokens})"
    return "\n".join(["import os", "def train(trial, config):", steps, *lines, ""])


def test_an_honest_program_attests_every_gate(own_packages: OwnPackages, tmp_path: Path) -> None:
    config, result = run(own_packages, tmp_path, loop("trial.attest(kind=config['kind'], fast=config['fast'])"))
    assert result.failure_class is None, result.message
    assert result.facts == {"kind": "b", "fast": False}
    assert result.program is not None
    assert config.package is not None
    assert result.program.code == config.package.digest
    assert result.program.argv == ("python", "-m", "ablate", "mine.training:train")
    assert [step.tokens for step in result.program_steps] == [8] * 5


@pytest.mark.parametrize(
    ("attestation", "observed"),
    [
        ("trial.attest(kind='a', fast=False)", {"kind": ("a", False), "fast": (False, True)}),
        ("trial.attest(kind='b')", {"kind": ("b", True), "fast": (None, False)}),
        ("trial.attest(kind='b', fast=0)", {"kind": ("b", True), "fast": (0, False)}),
        (
            "trial.attest(kind='b', fast=False); trial.attest(kind='a')",
            {"kind": ("mixed", False), "fast": (False, True)},
        ),
        ("pass", {"kind": (None, False), "fast": (None, False)}),
    ],
)
def test_a_gate_is_live_only_where_the_program_attests_its_value(
    own_packages: OwnPackages, tmp_path: Path, attestation: str, observed: dict[str, tuple[Any, bool]]
) -> None:
    config, result = run(own_packages, tmp_path, loop(attestation))
    assert result.failure_class is None, result.message
    readings = config.readings({"kind": "b", "fast": False}, result.facts)
    assert {name: (one.observed, one.live) for name, one in readings.items()} == observed


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (loop("trial.attest(kind=1.5)"), "allowed: true or false, a whole number, or text"),
        (loop("raise KeyError('x')"), "KeyError"),
        ("def other(trial, config): pass", "has no attribute 'train'"),
        ("import no_such_thing", "no_such_thing"),
        ("def train(trial, config): pass", "marked no steps"),
        (loop("trial._send('attested', values={'kind': [1]})"), "kind is attested as '[1]'"),
        (loop("trial._send('attested', values={'kind': 'x' * 1000})"), "is attested as"),
        (loop("[trial._send('attested', values={f'k{i}': i}) for i in range(300)]"), "more than 256 attested values"),
    ],
)
def test_a_program_that_fails_says_why(own_packages: OwnPackages, tmp_path: Path, training: str, message: str) -> None:
    _config, result = run(own_packages, tmp_path, training)
    assert result.failure_class is FailureClass.USER_ERROR
    assert message in str(result.message)


def test_code_that_changed_after_the_plan_is_no_measurement(own_packages: OwnPackages, tmp_path: Path) -> None:
    folder = own_packages.add("mine", declared("mine", TOKENS), loop("trial.attest(kind='b', fast=False)"))
    config = replace(config_of(), env={"PYTHONPATH": str(folder.parent)})
    folder.joinpath("helper.py").write_text("x = 1\n")
    result = ran(config, tmp_path / "home")
    assert result.failure_class is None, result.message
    assert result.program is not None
    problems = list(report_contradictions(result.program, config, result.program.window_s))
    assert len(problems) == 1
    assert "the code of recipe 'mine' is" in problems[0]
