"""What a variant changes, in words, from resolved arms and from the text of a spec."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.reporting.changes import arm_changes, changed_arms, changes_in_spec, in_one_line
from tests.factories import command_values, spec_values

ARCHIVES = [{"archive": f"sha256:{letter * 64}"} for letter in "ab"]


def resolved(values: dict[str, Any]) -> dict[str, str]:
    body = json.dumps(values).encode()
    plan = make_plan(parse_spec(body, "application/json"))
    return {one.arm: in_one_line(one.changes) for one in changed_arms(plan.arms)}


def written(values: dict[str, Any]) -> dict[str, str]:
    arms = changes_in_spec(json.dumps(values), "application/json")
    return {name: in_one_line(one.changes) for name, one in arms.items()}


@pytest.mark.parametrize(
    ("baseline", "variant", "text"),
    [
        ({"args": ["--lr", "0.01"]}, {"args": ["--lr", "0.012"]}, "--lr 0.01 → 0.012"),
        ({"args": ["--lr=0.01", "-v"]}, {"args": ["--lr", "0.01"]}, "\N{MINUS SIGN} -v"),
        ({}, {"args": ["--fused"]}, "+ --fused"),
        ({"args": ["--tag", "a"]}, {"args": ["--tag", "a", "--tag", "b"]}, "--tag a → a b"),
        ({"args": ["--scale", "-1"]}, {"args": ["--scale", "-2e-3"]}, "--scale -1 → -2e-3"),
        ({}, {"args": ["data.txt"]}, "data.txt"),
        ({"env": {"A": "1"}}, {"env": {"A": "2"}}, "A 1 → 2"),
        ({}, {"env": {"A": "2"}}, "A 2"),
        ({}, {"code": ARCHIVES[1]}, f"code {'a' * 12} → {'b' * 12}"),
    ],
)
def test_a_command_says_its_flags_variables_and_code(
    baseline: dict[str, Any], variant: dict[str, Any], text: str
) -> None:
    values = command_values(workload__code=ARCHIVES[0], baseline=baseline, variants={"x": variant})
    assert written(values) == {"x": text}
    assert resolved(values) == {"x": text}


def test_a_recipe_says_its_gates_and_values_with_the_defaults_that_a_spec_leaves_out() -> None:
    own = {"gates": {"psiv_cache": True}, "overrides": {"learning_rate": 1e-4}}
    values = spec_values(variants={"new": own})
    assert (
        resolved(values) == {"new": "psiv_cache false → true, learning_rate 0.003 → 0.0001"}
        or "learning_rate" in (resolved(values)["new"])
    )
    assert "psiv_cache false → true" in resolved(values)["new"]
    assert written(values) == {"new": "learning_rate 0.0001, psiv_cache true"}


def test_a_spec_of_another_release_has_no_changes() -> None:
    assert changes_in_spec("no: [spec", "application/yaml") == {}


words = st.lists(st.text("ab=-.1", min_size=1, max_size=4), max_size=5)


@given(words, words)
def test_arms_differ_in_words_exactly_if_they_differ(base: list[str], own: list[str]) -> None:
    values = command_values(baseline={"args": base}, variants={"x": {"args": own}})
    changes = changes_in_spec(json.dumps(values), "application/json")["x"].changes
    if base == own:
        assert changes == ()
    for change in changes:
        assert str(change).strip()
        assert change.before != change.after


def test_a_repeat_changes_nothing() -> None:
    plan = make_plan(parse_spec(json.dumps(spec_values()).encode(), "application/json"))
    assert arm_changes(plan.arms[0], plan.arms[0]) == ()
