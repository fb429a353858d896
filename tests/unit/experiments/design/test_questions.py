"""What makes two ablations ask the same."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.design.plan import question_digest, questions
from experiments.design.recipes import RECIPES
from tests.factories import make_plan, make_spec

TINY = RECIPES["hybrid-tiny"].config


def asked(**changes: Any) -> dict[str, str]:
    spec = make_spec(**changes)
    return questions(spec, make_plan(spec))


SAME: dict[str, dict[str, Any]] = {
    "name": {"ablation": "other", "question": "Another sentence?"},
    "seeds": {"design__seeds": [4, 5, 6], "design__order_seed": 1},
    "blocks": {"design__blocks": {"count": 20}},
    "looks": {"design__blocks": {"looks": [6, 10]}},
    "steps": {"workload__steps": {"warmup": 2, "timed": 9, "val_rows": 0}},
    "margin": {"verdict__primary": {"metric": "tokens_per_s", "margin": "1%"}},
    "limits": {"limits": {"trial": "9s", "device_minutes": 2.0, "priority": 3}},
    "labels": {"labels": {"try": "2"}},
    "override that changes nothing": {"workload__overrides": {"seq_len": TINY.data.seq_len}},
    "gate that is given as it is": {"baseline__gates": {"chunk_size": 16, "psiv_cache": False}},
}
OTHER: dict[str, dict[str, Any]] = {
    "override": {"workload__overrides": {"micro_batch": TINY.micro_batch + 1}},
    "metric": {"verdict__primary": {"metric": "step_s", "margin": "0.5%"}},
    "baseline": {"baseline__gates": {"chunk_size": 64}},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_question_stays_the_same(changes: dict[str, Any]) -> None:
    assert asked(**changes) == asked()


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_question_is_another(changes: dict[str, Any]) -> None:
    assert not set(asked(**changes).values()) & set(asked().values())


def test_node_class_makes_another_question() -> None:
    spec = make_spec()
    plan = make_plan(spec)
    elsewhere = questions(spec, plan.model_copy(update={"node_class": "h200"}))
    assert not set(elsewhere.values()) & set(questions(spec, plan).values())


GATES = {"a": {"psiv_cache": True}, "b": {"chunk_size": 32}, "c": {"chunk_size": 64}, "d": {"loss": "chunked"}}


@given(
    st.lists(st.sampled_from(sorted(GATES)), min_size=1, unique=True),
    st.lists(st.sampled_from(sorted(GATES)), min_size=1, unique=True),
)
def test_variants_ask_by_their_gates_whatever_their_names_and_order(one: list[str], other: list[str]) -> None:
    first = asked(variants={f"x-{name}": {"gates": GATES[name]} for name in one})
    second = asked(variants={f"y-{name}": {"gates": GATES[name]} for name in other})
    shared = {name[2:] for name in first} & {name[2:] for name in second}
    assert len(set(first.values()) & set(second.values())) == len(shared)
    assert all(first[f"x-{name}"] == second[f"y-{name}"] for name in shared)
    assert (question_digest(first.values()) == question_digest(second.values())) is (set(one) == set(other))


def test_a_variant_that_repeats_the_baseline_asks_nothing() -> None:
    assert asked(purpose="calibration", variants={"again": {"gates": {"chunk_size": 16}}}) == {}
    assert question_digest([]) is None
