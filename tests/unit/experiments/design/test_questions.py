"""What makes two ablations ask the same: the content of a pair of arms and the number that decides."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.design.gate import read_field, replace_fields
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.metrics import METRICS, WINDOW_METRICS
from ablate.experiments.design.plan import question_digest, questions
from ablate.experiments.design.recipes import OVERRIDES, RECIPES
from ablate.experiments.digest import canonical_json
from tests.factories import command_values, make_plan, make_spec, spec_values
from tests.own_packages import OwnPackages, declared, own_packages

__all__ = ["own_packages"]

TINY = RECIPES["hybrid-tiny"].config


def asked_by(values: dict[str, Any]) -> dict[str, str]:
    spec = parse_spec(canonical_json(values).encode(), "application/json")
    return questions(spec, make_plan(spec))


def asked(**changes: Any) -> dict[str, str]:
    return asked_by(spec_values(**changes))


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
    "another micro-batch": {"workload__overrides": {"micro_batch": TINY.micro_batch + 1}},
    "other threads": {"workload__overrides": {"threads": 1}},
    "a slightly longer row": {"workload__overrides": {"seq_len": TINY.data.seq_len + 1}},
    "override without effect": {"workload__overrides": {"loss_chunk_tokens": 64}},
    "gate that is given as it is": {"baseline__gates": {"chunk_size": 16, "psiv_cache": False}},
    **{f"alias {name}": {"verdict__primary": {"metric": name, "margin": "1%"}} for name in WINDOW_METRICS},
}
OTHER: dict[str, dict[str, Any]] = {
    "rows twice as long": {"workload__overrides": {"seq_len": 2 * TINY.data.seq_len}},
    "metric": {"verdict__primary": {"metric": "peak_allocated_gib", "margin": "0.5%"}},
    "baseline": {"baseline__gates": {"chunk_size": 64}},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_question_stays_the_same(changes: dict[str, Any]) -> None:
    assert asked(**changes) == asked()


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
def test_question_is_another(changes: dict[str, Any]) -> None:
    assert not set(asked(**changes).values()) & set(asked().values())


def test_arms_that_differ_in_a_size_alone_ask_by_that_size() -> None:
    sizes = {f"rows-{rows}": {"overrides": {"micro_batch": rows}} for rows in (1, 3, 4)}
    work = {"verdict__primary": {"metric": "model_tflops_per_s", "margin": "1%"}}
    assert len(set(asked(variants=sizes, **work).values())) == 3


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


CHOICES: dict[str, tuple[Any, ...]] = {
    "chunk_size": (8, 16, 32, 64),
    "psiv_cache": (False, True),
    "loss": ("dense", "chunked"),
    "compile": (False, True),
    "dtype": ("float32", "bfloat16"),
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    "seq_len": (128, 256),
    "softcap": (0.0, 30.0, 50.0),
    "learning_rate": (3e-3, 1e-3),
    "mlp_ratio": (2.0, 3.0),
    "pattern": ("MMAF", "MF", "MAMF"),
}
ALIKE: dict[str, str] = dict.fromkeys(
    ("tokens_per_s", "tokens_per_s_per_device", "step_s", "model_tflops_per_s"), "window"
)


def drawn(rng: random.Random) -> dict[str, Any]:
    """Draw an ablation: overrides, a baseline with every gate, and one variant with at least one other gate."""
    base = {name: rng.choice(allowed) for name, allowed in CHOICES.items()}
    own = {
        name: rng.choice([value for value in CHOICES[name] if value != base[name]])
        for name in rng.sample(sorted(CHOICES), rng.randint(1, 3))
    }
    numbers = {name: rng.choice(allowed) for name, allowed in NUMBERS.items() if rng.random() < 0.5}
    return spec_values(
        workload__overrides={"loss_chunk_tokens": 64, **numbers},
        baseline={"gates": base},
        variants={"new": {"gates": own}},
        verdict__primary={"metric": rng.choice(sorted(ALIKE)), "margin": "0.5%"},
    )


def other_alias(values: dict[str, Any], rng: random.Random) -> None:
    values["verdict"]["primary"]["metric"] = rng.choice(sorted(ALIKE))


def swapped(values: dict[str, Any], _rng: random.Random) -> None:
    base = values["baseline"]["gates"]
    (own,) = (one["gates"] for one in values["variants"].values())
    values["baseline"] = {"gates": {**base, **own}}
    values["variants"] = {"old": {"gates": {name: base[name] for name in own}}}


def renamed(values: dict[str, Any], rng: random.Random) -> None:
    values |= {"ablation": f"again-{rng.randint(0, 99)}", "question": "Is it really?", "labels": {"try": "2"}}
    values["variants"] = {f"arm-{rng.randint(0, 99)}": one for one in values["variants"].values()}


def other_sizes(values: dict[str, Any], rng: random.Random) -> None:
    values["workload"].setdefault("overrides", {}).update(micro_batch=rng.randint(1, 9), threads=rng.randint(1, 2))


def another_sample(values: dict[str, Any], rng: random.Random) -> None:
    values["design"] = {"seeds": [rng.randint(1, 9)], "blocks": {"count": rng.randint(6, 30)}, "order_seed": 3}
    values["workload"]["steps"] = {"warmup": 2, "timed": rng.randint(3, 30), "val_rows": 0}
    values["limits"] = {"device_minutes": 9.0}


def spelled_out(values: dict[str, Any], rng: random.Random) -> None:
    given = values["workload"].setdefault("overrides", {})
    for name in rng.sample(sorted(OVERRIDES), 4):
        if name != "micro_batch":
            given.setdefault(name, read_field(RECIPES[values["workload"]["recipe"]].config, OVERRIDES[name].path))


def renamed_recipe(values: dict[str, Any], rng: random.Random) -> None:
    given = values["workload"].pop("overrides", {})
    kept = {name: value for name, value in given.items() if rng.random() < 0.5}
    baked = {OVERRIDES[name].path: value for name, value in given.items() if name not in kept}
    values["workload"] |= {"recipe": "hybrid-tiny-2", "overrides": kept}
    RECIPES["hybrid-tiny-2"] = replace(RECIPES["hybrid-tiny"], config=replace_fields(TINY, baked), name="hybrid-tiny-2")


DISGUISES: tuple[Callable[[dict[str, Any], random.Random], None], ...] = (
    other_alias,
    swapped,
    renamed,
    another_sample,
    other_sizes,
    spelled_out,
    renamed_recipe,
)


def with_others(values: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Add one or two more variants that are neither of the two arms."""
    base, (own,) = values["baseline"]["gates"], [one["gates"] for one in values["variants"].values()]
    values = copy.deepcopy(values)
    for number in range(rng.randint(1, 2)):
        more = {name: rng.choice(allowed) for name, allowed in CHOICES.items()}
        taken = [{**base, **one["gates"]} for one in values["variants"].values()]
        if more not in (base, {**base, **own}, *taken):
            values["variants"][f"more-{number}"] = {"gates": more}
    return values


def changed(values: dict[str, Any], rng: random.Random) -> None:
    """Change one thing that matters: a gate of the variant, a gate of both arms, an override or the metric."""
    base, (own,) = values["baseline"]["gates"], [one["gates"] for one in values["variants"].values()]
    what = rng.choice(("variant", "both", "override", "metric"))
    if what == "variant":
        name = rng.choice(sorted(set(CHOICES) - set(own)))
        own[name] = rng.choice([value for value in CHOICES[name] if value != base[name]])
    elif what == "both":
        name = rng.choice(sorted(set(CHOICES) - set(own)))
        base[name] = rng.choice([value for value in CHOICES[name] if value != base[name]])
    elif what == "override":
        given = values["workload"].setdefault("overrides", {})
        given["seq_len"] = 512
    else:
        values["verdict"]["primary"] = {"metric": "peak_allocated_gib", "margin": "0.5%"}


@given(st.integers(0, 2**32))
def test_no_disguise_makes_another_question_and_every_honest_change_does(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # drawn examples
    values = drawn(rng)
    with patch.dict(RECIPES):
        (first,) = asked_by(values).values()
        hidden = copy.deepcopy(values)
        for disguise in rng.sample(DISGUISES, rng.randint(1, len(DISGUISES))):
            disguise(hidden, rng)
        assert set(asked_by(hidden).values()) == {first}
        assert first in asked_by(with_others(hidden, rng)).values()
        changed(hidden, rng)
        assert first not in asked_by(hidden).values()


@pytest.mark.parametrize("metric", sorted(name for name in METRICS if name not in ALIKE and METRICS[name].decides))
def test_no_other_metric_is_an_alias(metric: str) -> None:
    spec = make_spec()
    primary = spec.verdict.primary.model_copy(update={"metric": metric})
    other = spec.model_copy(update={"verdict": spec.verdict.model_copy(update={"primary": primary})})
    assert not set(questions(other, make_plan(spec)).values()) & set(asked().values())


def test_metrics_of_the_window_differ_where_arms_do_other_work() -> None:
    """Half the rows take half the time, and say nothing about the speed of a token."""
    rows = {"half": {"gates": {"micro_batch": 1}}}
    comparable = sorted({*ALIKE} - {"step_s"})
    per_metric = [asked(variants=rows, verdict__primary={"metric": metric, "margin": "1%"}) for metric in comparable]
    assert len({one["half"] for one in per_metric}) == 2


def test_a_command_is_the_same_wherever_its_arguments_stand() -> None:
    whole = {"command": ["python", "train.py", "--seed", "{seed}"], "code": "/srv/lab"}
    steps = {"steps": {"warmup": 2, "timed": 5}}
    parted = {"command": ["python"], "code": "/srv/lab", **steps}
    script = ["train.py", "--seed", "{seed}"]
    same = command_values(
        workload=parted, baseline={"args": script}, variants={"x": {"args": [*script, "--loss=fused"]}}
    )
    turned = command_values(
        workload={**whole, **steps}, baseline={"args": ["--loss=fused"]}, variants={"plain": {"args": []}}
    )
    first = set(asked_by(command_values()).values())
    assert set(asked_by(same).values()) == set(asked_by(turned).values()) == first
    other = command_values(variants={"fused": {"args": ["--loss=fast"]}})
    assert not set(asked_by(other).values()) & first


def test_a_printed_or_logged_metric_is_its_place_whatever_its_name() -> None:
    def printed(name: str, line: str | None, **place: str) -> set[str]:
        metric = {name: {"better": "lower", **({} if line is None else {"line": line}), **place}}
        made = command_values(
            workload__metrics=metric,
            design__seeds=list(range(6)),
            verdict__primary={"metric": name, "margin": "1%"},
        )
        return set(asked_by(made).values())

    assert printed("val", "val loss: {}") == printed("loss2", "val loss: {}")
    board = {"from": "tensorboard", "tag": "val"}
    assert printed("val", None, **board) == printed("loss2", None, **board)
    different = (printed("val", "train loss: {}"), printed("val", None), printed("other", None))
    different += (printed("val", None, **board), printed("val", None, **{**board, "from": "wandb"}))
    assert len({one for asked_one in (printed("val", "val loss: {}"), *different) for one in asked_one}) == 6


def test_a_recipe_of_a_package_is_its_program_whatever_its_name(own_packages: OwnPackages) -> None:
    def of(recipe: str, **overrides: Any) -> set[str]:
        workload = {"recipe": recipe, "steps": {"warmup": 1, "timed": 3}, "overrides": overrides}
        return set(
            asked_by(spec_values(workload=workload, baseline={}, variants={"b": {"gates": {"kind": "b"}}})).values()
        )

    own_packages.add("mine")
    own_packages.add("again", declared("again", train="mine.training:train"))
    own_packages.add("other", declared("other"))
    assert of("mine") == of("again") == of("mine", width=8)
    assert not of("mine") & (of("other") | of("mine", width=16))
