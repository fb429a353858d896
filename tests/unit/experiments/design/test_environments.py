"""Python environments in specs of commands: those of the node, and those that locks describe."""

from typing import Any

import pytest
import yaml

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import Plan, make_plan
from ablate.experiments.errors import SpecError
from tests.factories import command_values as values


def planned(made: dict[str, Any]) -> Plan:
    return make_plan(parse_spec(yaml.safe_dump(made).encode(), "application/yaml"))


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"workload__environment": "Torch!"}, "#/workload/environment", "allowed: a name of up to 40 of a-z"),
        ({"workload__environment": 41 * "a"}, "#/workload/environment", "allowed: a name of up to 40 of a-z"),
        ({"workload__environment": {"file": "x"}}, "#/workload/environment", "or {lock: FILE} with a file of the code"),
        ({"workload__environment": {"lock": 3}}, "#/workload/environment", "lock is 3; allowed: a file of the code"),
        ({"workload__environment": {"lock": "../a"}}, "#/workload/environment", "below the folder of the code"),
        ({"variants": {"x": {"environment": {"lock": "/a"}}}}, "#/variants/x/environment", "below the folder of the"),
        ({"variants": {"x": {"environment": "torch25"}}}, "#/variants/x/environment", "are a lock, {lock: FILE}"),
        (
            {"workload__code": None, "variants": {"x": {"environment": {"lock": "a"}}}},
            "#/variants/x/environment",
            "a lock is a file of the code, and this workload has none",
        ),
        (
            {"workload__environment": "torch25", "variants": {"x": {"environment": {"lock": "a"}}}},
            "#/variants/x/environment",
            "the baseline runs in environment 'torch25' of the node",
        ),
        (
            {
                "workload__environment": {"lock": "a"},
                "workload__metrics": {"a": {"better": "lower"}},
                "workload__evaluate": ["python", "judge.py"],
            },
            "#/workload/environment",
            "no code of an arm may choose them",
        ),
    ],
)
def test_a_wrong_environment_is_refused_with_its_place(changes: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        planned(values(**changes))
    (problem,) = refused.value.problems
    assert problem.pointer == where
    assert words in problem.detail


def test_locks_are_parts_of_their_arms_and_need_no_lane_of_their_own() -> None:
    lock = {"environment": {"lock": "new.lock"}}
    plan = planned(values(workload__environment={"lock": "old.lock"}, variants={"new": lock, "args": {"args": ["a"]}}))
    locks = {arm.name: arm.config.values_with_seed.get("lock") for arm in plan.arms}
    assert locks == {"baseline": "old.lock", "new": "new.lock", "args": "old.lock"}
    assert {arm.name: arm.gates["environment"] for arm in plan.arms} == locks
    assert {arm.config.lane() for arm in plan.arms} == {"command"}
    assert len({arm.config.prepared for arm in plan.arms}) == 2, "one preparation for each lock"
    with pytest.raises(SpecError, match="the same configuration"):
        planned(values(workload__environment={"lock": "new.lock"}, variants={"same": lock}))
    plain = planned(values())
    assert all("lock" not in arm.config.values_with_seed for arm in plain.arms)
    assert all("environment" not in arm.gates for arm in plain.arms)
    assert plan.baseline.config.shape() == {**plain.baseline.config.shape(), "lock": "old.lock"}, "noise of its own"
