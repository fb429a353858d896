"""Recipes of packages: their declarations, the specs that name them, and what a trial of one must prove."""

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ablate.experiments.analysis.evidence import weakest_claim
from ablate.experiments.design import packages
from ablate.experiments.design.aa_spec import bare_spec, calibration_spec
from ablate.experiments.design.arms import resolve
from ablate.experiments.design.checks import other_model, other_work
from ablate.experiments.design.gate import Claim
from ablate.experiments.design.kinds.command import CommandArm
from ablate.experiments.design.listings import gates_of, public_gates, public_recipes
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.design.plan import make_plan, questions
from ablate.experiments.design.spec import AblationSpec, ablation_json_schema
from ablate.experiments.design.spec_values import MOST_LETTERS
from ablate.experiments.errors import SpecError
from ablate.service.store.tables import blocks
from tests.factories import spec_values
from tests.own_packages import DECLARATION, OwnPackages, declared, own_packages

__all__ = ["own_packages"]


def values(**changes: Any) -> dict[str, Any]:
    workload = {"recipe": "mine", "steps": {"warmup": 1, "timed": 3}, **changes.pop("workload", {})}
    plain = {"workload": workload, "baseline": {}, "variants": {"b": {"gates": {"kind": "b"}}}, **changes}
    return spec_values(**plain)


def parse(plain: Mapping[str, Any]) -> AblationSpec:
    return parse_spec(json.dumps(plain).encode(), "application/json")


def refused(plain: Mapping[str, Any]) -> list[tuple[str, str, str | None]]:
    with pytest.raises(SpecError) as caught:
        make_plan(parse(plain))
    return [(one.pointer, one.detail, one.hint) for one in caught.value.problems]


def test_arms_of_a_package_have_its_values_gates_claims_and_code(own_packages: OwnPackages) -> None:
    functions = """
def tokens(config): return config["width"] * 2
def flops(config): return config["width"] * 100
RECIPE["tokens_per_step"], RECIPE["flops_per_step"] = tokens, flops
"""
    folder = own_packages.add("mine", declared("mine", functions))
    plain = values(workload={"overrides": {"width": 16, "rate": 1}}, baseline={"gates": {"fast": True}})
    base, variant = make_plan(parse(plain)).arms
    assert base.gates == {"kind": "a", "fast": True}
    assert variant.gates == {"kind": "b", "fast": True}
    package = variant.config.with_seed(1).package
    assert package.values == {"width": 16, "rate": 1, "kind": "b", "fast": True}
    assert (package.tokens_per_step, package.flops_per_step) == (32, 1600)
    whole = hashlib.sha256()
    for name in ("__init__.py", "declaration.py", "training.py"):
        whole.update(f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    assert package.digest == f"sha256:{whole.hexdigest()}"
    workload = variant.config
    assert workload.lane() == f"recipe:mine@{whole.hexdigest()[:12]}"
    assert workload.claim(variant.gates, base.gates) is Claim.CHANGES_MODEL
    assert workload.claim({**base.gates, "fast": False}, base.gates) is Claim.SCHEDULE_ONLY
    assert other_model(variant, base) == "kind b instead of a"
    assert other_work(METRICS["step_s"], variant.config, base.config, equal="steps") is None
    assert workload.shape() == base.config.shape()
    changed = make_plan(parse(values(workload={"overrides": {"width": 32}}))).arms[0]
    assert changed.config.shape() != workload.shape()


def test_arms_of_a_package_differ_in_its_values_too(own_packages: OwnPackages) -> None:
    own_packages.add("mine")
    variants = {"wide": {"overrides": {"width": 16}}, "both": {"overrides": {"rate": 1}, "gates": {"kind": "b"}}}
    spec = parse(values(workload={"overrides": {"width": 4}}, variants=variants))
    base, wide, both = make_plan(spec).arms
    assert [arm.config.values for arm in (base, wide, both)] == [
        {"width": 4, "rate": 0.5},
        {"width": 16, "rate": 0.5},
        {"width": 4, "rate": 1.0},
    ]
    assert (other_model(wide, base), other_model(both, base)) == (
        "width 16 instead of 4",
        "kind b instead of a, rate 1.0 instead of 0.5",
    )
    assert weakest_claim(wide, base) is Claim.CHANGES_MODEL
    assert wide.gates == base.gates
    assert len(set(questions(spec, make_plan(spec)).values())) == 2
    schema = ablation_json_schema()["$defs"]["VariantSpec"]["properties"]["overrides"]["properties"]
    assert "width" in schema


def test_arms_of_a_package_train_on_equal_tokens_if_it_declares_them(own_packages: OwnPackages) -> None:
    functions = """
RECIPE["tokens_per_step"] = lambda config: config["width"] * 2
RECIPE["flops_per_step"] = lambda config: config["width"] * 100
"""
    own_packages.add("mine", declared("mine", functions))
    more = {
        "variants": {"wide": {"overrides": {"width": 16}}},
        "design__seeds": list(range(6)),
        "verdict": {"primary": {"metric": "loss_final", "margin": "1%"}},
    }
    (unequal,) = refused(values(**more))
    assert unequal[0] == "#/verdict/primary/metric"
    assert "it trains on 160 tokens, the baseline on 80" in unequal[1]
    (odd,) = refused(values(workload={"steps": {"warmup": 1, "timed": 3, "equal": "tokens"}}, **more))
    assert odd[::2] == ("#/workload/steps/timed", "numbers that divide: 4")
    base, wide = make_plan(parse(values(workload={"steps": {"warmup": 1, "timed": 4, "equal": "tokens"}}, **more))).arms
    assert [arm.config.with_seed(1).steps.total for arm in (base, wide)] == [6, 3]
    own_packages.forget()
    own_packages.add("mine2", declared("mine2"))
    steps = {"warmup": 1, "timed": 4, "equal": "tokens"}
    assert refused(values(workload={"recipe": "mine2", "steps": steps}, **more))[0][0] == "#/workload/steps/equal"


def test_one_and_one_point_zero_are_one_value_of_a_package(own_packages: OwnPackages) -> None:
    own_packages.add("mine")
    plain = values(workload={"overrides": {"rate": 1.0}}, variants={"x": {"overrides": {"rate": 1}}})
    assert [where for where, _what, _hint in refused(plain)] == ["#/variants/x"]


def test_other_code_of_a_package_is_another_arm_and_another_lane(own_packages: OwnPackages) -> None:
    folder = own_packages.add("mine")
    before = make_plan(parse(values())).baseline
    folder.joinpath("training.py").write_text("def train(trial, config): raise SystemExit\n")
    packages.installed.cache_clear()
    after = make_plan(parse(values())).baseline
    assert before.digest != after.digest
    assert before.config.lane() != after.config.lane()


@pytest.mark.parametrize(
    ("changes", "pointer", "detail"),
    [
        ({"workload": {"recipe": "mein"}}, "#/workload/recipe", "unknown recipe 'mein'"),
        ({"variants": {"x": {"gates": {"knd": "b"}}}}, "#/variants/x/gates/knd", "known: kind, fast"),
        ({"variants": {"x": {"gates": {"kind": "c"}}}}, "#/variants/x/gates/kind", "allowed: a, b"),
        ({"variants": {"x": {"gates": {"fast": 1}}}}, "#/variants/x/gates/fast", "allowed: false, true"),
        ({"variants": {"x": {"gates": {"lane": "cuda"}}}}, "#/variants/x/gates/lane", "of recipe 'mine'"),
        ({"baseline": {"gates": {"kind": True}}}, "#/baseline/gates/kind", "allowed: a, b"),
        ({"workload": {"overrides": {"width": 3}}}, "#/workload/overrides/width", "an integer from 4 to 64"),
        ({"workload": {"overrides": {"width": 8.0}}}, "#/workload/overrides/width", "an integer from 4 to 64"),
        ({"workload": {"overrides": {"width": True}}}, "#/workload/overrides/width", "an integer from 4 to 64"),
        ({"workload": {"overrides": {"rate": 1.5}}}, "#/workload/overrides/rate", "a number from 0 to 1"),
        ({"workload": {"overrides": {"kind": "b"}}}, "#/workload/overrides/kind", "unknown override 'kind'"),
        ({"workload": {"overrides": {"d_model": 64}}}, "#/workload/overrides/d_model", "known: width, rate"),
        ({"variants": {"x": {"overrides": {"width": 65}}}}, "#/variants/x/overrides/width", "an integer from 4 to 64"),
        ({"variants": {"x": {"overrides": {"fast": True}}}}, "#/variants/x/overrides/fast", "known: width, rate"),
        ({"variants": {"x": {"args": ["-v"]}}}, "#/variants/x", "this workload is recipe 'mine'"),
        ({"variants": {"x": {"gates": {"kind": "a"}}}}, "#/variants/x", "same configuration as the baseline"),
        ({"workload": {"steps": {"timed": 4, "slice": 3}}}, "#/workload/steps/slice", "an even number of slices of 3"),
    ],
)
def test_a_spec_that_does_not_fit_the_package_is_refused_at_its_line(
    own_packages: OwnPackages, changes: dict[str, Any], pointer: str, detail: str
) -> None:
    own_packages.add("mine")
    problems = refused(values(**changes))
    assert any(where == pointer and detail in what for where, what, _hint in problems), problems


def test_values_that_the_package_refuses_are_named_with_their_arm(own_packages: OwnPackages) -> None:
    functions = """
def check(config):
    if config["kind"] == "b" and config["width"] < 16: raise ValueError(f"kind b needs width 16, got {config['width']}")
RECIPE["check"] = check
"""
    own_packages.add("mine", declared("mine", functions))
    assert refused(values()) == [
        ("#/variants/b", "recipe 'mine' refuses these values: kind b needs width 16, got 8", None)
    ]
    assert len(make_plan(parse(values(workload={"overrides": {"width": 16}}))).arms) == 2


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("RECIPE = 3", "is a int; allowed: a mapping"),
        ("import jax as _; RECIPE = {}", "jax"),
        (declared("mine", version=0), "version"),
        (declared("mine", train="nowhere"), "no package 'nowhere'"),
        (declared("mine", train="no_such_package_here.x:y"), "no package 'no_such_package_here' is installed"),
        (declared("mine", config={"width": 8}), "gate 'kind' is no field of config"),
        (declared("mine", config={**DECLARATION["config"], "kind": "c"}), "none of its values"),  # type: ignore[dict-item]
        (declared("mine", config={**DECLARATION["config"], "width": 1}), "override 'width' is 1"),  # type: ignore[dict-item]
        (declared("mine", node_classes=["tpu-v6e"]), "runs no recipes of packages"),
        (declared("mine", more=1), "more"),
        ("RECIPE = {}", "Field required"),
    ],
)
def test_a_broken_declaration_is_a_problem_with_its_reason_and_breaks_nothing_else(
    own_packages: OwnPackages, declaration: str, reason: str
) -> None:
    own_packages.add("mine", declaration)
    own_packages.add("other")
    own = packages.installed()
    assert list(own.recipes) == ["other"]
    assert reason in own.problems["mine"]
    ((where, detail, _hint),) = refused(values())
    assert where == "#/workload/recipe"
    assert reason in detail


def test_names_that_two_packages_or_the_product_have_are_problems(own_packages: OwnPackages) -> None:
    own_packages.add("mine")
    own_packages.points.append(own_packages.points[0])
    own_packages.add("hybrid_tiny")
    own = packages.installed()
    assert own.recipes == {}
    assert "two packages declare a recipe of this name" in own.problems["mine"]
    assert "a built-in recipe has this name" in own.problems["hybrid-tiny"]


def test_a_package_may_declare_metrics_and_require_kernels(own_packages: OwnPackages) -> None:
    own_packages.add("mine")
    workload = {"metrics": {"val": {"better": "lower", "line": "val {}"}}, "require_kernels": {"b": "gelu"}}
    primary = {"primary": {"metric": "val", "margin": "1%", "adopt_if": "2%"}}
    design = {"seeds": list(range(1, 7)), "blocks": {"count": 6}}
    base, arm = make_plan(parse(values(workload=workload, verdict=primary, design=design))).arms
    read = arm.config.with_seed(1)
    assert (read.metrics, read.lines, read.profile) == ({"val": "lower"}, {"val": "val {}"}, True)
    assert (read.required_kernels, base.config.with_seed(1).required_kernels) == ({"gelu": None}, {})
    problems = refused(values(workload={"require_kernels": {"c": "gelu"}}))
    assert [(where, detail) for where, detail, _hint in problems] == [
        ("#/workload/require_kernels/c", "'c' is no arm of this ablation; arms: baseline, b")
    ]
    builtin = spec_values(workload={"recipe": "hybrid-tiny", "metrics": {"val": {"better": "lower"}}})
    with pytest.raises(SpecError, match="'metrics' belongs to a command"):
        parse(builtin)


@pytest.mark.parametrize("line", ["val loss", "{} {}", "{}", " {} ", "a{b}c{}", "x\ny {}", "l" * 200 + "{}"])
def test_a_line_without_one_place_for_its_number_is_refused(line: str) -> None:
    command = {"command": ["python"], "metrics": {"val": {"better": "lower", "line": line}}}
    with pytest.raises(SpecError):
        parse(spec_values(workload=command, baseline={}, variants={"x": {"args": ["-v"]}}))


def test_the_longest_names_fit_into_the_lanes_of_a_block(own_packages: OwnPackages) -> None:
    own_packages.add("m" * MOST_LETTERS)
    own_packages.add("n" * (MOST_LETTERS + 1))
    own = packages.installed()
    (recipe,) = own.recipes.values()
    assert "allowed: 1 to 40" in own.problems["n" * (MOST_LETTERS + 1)]
    room = blocks.c.lanes.type.length
    assert len(recipe.lane) <= room
    assert len(CommandArm(command=("a",), environment="e" * MOST_LETTERS).lane()) <= room
    command = {"command": ["python"], "environment": "e" * (MOST_LETTERS + 1)}
    with pytest.raises(SpecError, match="40"):
        parse(spec_values(workload=command, baseline={}, variants={"x": {"args": ["-v"]}}))


def test_a_declaration_that_imports_a_heavy_library_is_refused(own_packages: OwnPackages) -> None:
    assert "tensorflow" not in sys.modules
    own_packages.add("mine", "import sys, types; sys.modules['tensorflow'] = types.ModuleType('t'); RECIPE = {}")
    try:
        assert "imports tensorflow" in packages.installed().problems["mine"]
    finally:
        del sys.modules["tensorflow"]


def test_a_spec_is_read_where_its_package_is_not_installed(own_packages: OwnPackages) -> None:
    """Receipts and bundles verify on any machine, so the spec in them has to be readable there."""
    folder = own_packages.add("mine")
    spec = parse(values())
    plan = make_plan(spec)
    own_packages.points.clear()
    packages.installed.cache_clear()
    assert folder.exists()
    elsewhere = parse(values())
    assert elsewhere.digest == spec.digest
    assert resolve(elsewhere).problems[0].pointer == "#/workload/recipe"
    workload = plan.arms[1].config
    assert workload.claim(plan.arms[1].gates, plan.baseline.gates) is Claim.CHANGES_MODEL
    assert questions(elsewhere, plan) == questions(spec, plan)


def test_listings_and_schema_show_installed_recipes_and_only_those(own_packages: OwnPackages) -> None:
    plain = json.dumps(ablation_json_schema())
    own_packages.add("mine")
    assert [row.name for row in public_recipes()][-1] == "mine"
    assert {row.name for row in public_gates() if "mine" in row.recipes} == {"kind", "fast"}
    assert list(gates_of("mine")) == ["kind", "fast"]
    assert "mine" in json.dumps(ablation_json_schema())
    own_packages.points.clear()
    packages.installed.cache_clear()
    assert json.dumps(ablation_json_schema()) == plain


def test_a_calibration_of_a_package_repeats_its_baseline(own_packages: OwnPackages) -> None:
    own_packages.add("mine")
    for like in (parse(values()), parse(values(baseline={"gates": {"fast": True}}))):
        calibration = parse_spec(calibration_spec(like, node_class="cpu", blocks=20, order_seed=1), "application/yaml")
        base, repeat = make_plan(calibration).arms
        assert base.digest == repeat.digest == make_plan(like).baseline.digest


def test_drawn_declarations_and_specs_agree_with_a_second_reading(own_packages: OwnPackages) -> None:
    """Draw configurations, gates and overrides; the arms hold what a plain merge of dictionaries gives."""
    rng = random.Random(20261126)  # noqa: S311 - a reproducible draw
    pool: list[Any] = [True, False, 0, 1, -3, 2.5, "a", "b", "true"]
    for index in range(40):
        name = f"drawn_{index}"
        gates = {
            f"g{i}": rng.sample([v for v in pool if not isinstance(v, float)], rng.randint(2, 4))
            for i in range(rng.randint(1, 4))
        }
        config: dict[str, Any] = {gate: rng.choice(allowed) for gate, allowed in gates.items()}
        config |= {f"o{i}": rng.randint(-50, 50) for i in range(rng.randint(0, 3))}
        text = {"question": "?", "claim": rng.choice(list(Claim)).value, "proof": "p", "blind_to": "b"}
        overrides = {o: {"description": "d", "minimum": -50, "maximum": 50} for o in config if o.startswith("o")}
        source = declared(
            name, config=config, gates={g: {**text, "values": v} for g, v in gates.items()}, overrides=overrides
        )
        own_packages.add(name, source)
        chosen = {o: rng.randint(-60, 60) for o in overrides if rng.random() < 0.6}
        variant = {g: rng.choice([*v, *pool[:5], "c"]) for g, v in gates.items() if rng.random() < 0.8} or {
            "g0": config["g0"]
        }
        legal = all(-50 <= v <= 50 for v in chosen.values()) and all(
            any(type(v) is type(one) and v == one for one in gates[g]) for g, v in variant.items()
        )
        differs = any(type(v) is not type(config[g]) or v != config[g] for g, v in variant.items())
        plain = values(
            workload={"recipe": name.replace("_", "-"), "overrides": chosen}, variants={"v": {"gates": variant}}
        )
        if not (legal and differs):
            assert refused(plain), (config, variant, chosen)
            continue
        base, arm = make_plan(parse(plain)).arms
        expected = {**config, **chosen, **variant}
        assert json.dumps(arm.config.package.values, sort_keys=True) == json.dumps(expected, sort_keys=True)
        assert dict(base.gates) == {g: config[g] for g in gates}


def test_a_bare_spec_repeats_any_known_recipe(own_packages: OwnPackages) -> None:
    with pytest.raises(SpecError, match="unknown recipe 'mine'"):
        bare_spec("mine", "cpu")
    own_packages.add("mine")
    for recipe in ("mine", "hybrid-tiny"):
        base, repeat = resolve(bare_spec(recipe, "cpu").model_copy(update={"purpose": "calibration"})).arms
        assert base.digest == repeat.digest


def test_package_folders_reach_an_isolated_trial(own_packages: OwnPackages) -> None:
    folder: Path = own_packages.add("mine")
    arm = make_plan(parse(values())).baseline
    assert folder in arm.config.libraries
