"""A/A specs: the baseline against itself, in the circumstances of another spec."""

import json

import pytest

from ablate.experiments.catalog.files import catalog_names, read_catalog_file
from ablate.experiments.design.aa_spec import CONTENT_TYPE, REPEAT, bare_spec, calibration_spec, spec_like
from ablate.experiments.design.arms import resolve
from ablate.experiments.design.load import load_values, parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.errors import SpecError
from tests.factories import catalog_spec, make_spec, spec_values

NEEDS_NO_CALIBRATION = ("demo-refused", "tpu-memory", "tpu-mesh")  # cannot run, or decides by exact metrics
CATALOG = [name for name in catalog_names() if name not in NEEDS_NO_CALIBRATION]


@pytest.mark.parametrize("name", CATALOG)
def test_it_repeats_the_baseline_of_the_spec_in_its_workload(name):
    like = catalog_spec(name)
    spec = parse_spec(
        calibration_spec(like, node_class=like.placement.node_class, blocks=23, order_seed=7), CONTENT_TYPE
    )
    plan = make_plan(spec)
    assert [arm.name for arm in plan.arms] == ["baseline", REPEAT]
    assert plan.arms[0].digest == plan.arms[1].digest == resolve(like).arms[0].digest
    assert (spec.workload, spec.baseline, spec.design.seeds) == (like.workload, like.baseline, like.design.seeds)
    decides = like.verdict.primary
    assert spec.verdict.primary == decides or decides.exact or decides.over_seeds
    assert (len(plan.blocks), spec.purpose, spec.design.order_seed) == (23, "calibration", 7)
    assert all(set(block.order) == {"baseline", REPEAT} for block in plan.blocks)


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_recipe_alone_is_enough(recipe):
    node_class = (RECIPES[recipe].node_classes or ("cpu",))[0]
    like = bare_spec(recipe, node_class)
    plan = make_plan(parse_spec(calibration_spec(like, node_class=node_class, blocks=20, order_seed=7), CONTENT_TYPE))
    assert plan.arms[0].digest == plan.arms[1].digest


@pytest.mark.parametrize("variants", [{}, {"variants": None}, {"variants": {}}], ids=str)
@pytest.mark.parametrize("name", CATALOG)
def test_a_spec_needs_no_variants(name, variants):
    content = read_catalog_file(name).replace(b"code: .", b"code: /code")
    values = load_values(content, CONTENT_TYPE)
    del values["variants"]
    without = spec_like(json.dumps({**values, **variants}).encode(), "application/json")
    plans = []
    for like in (spec_like(content, CONTENT_TYPE), without):
        text = calibration_spec(like, node_class=like.placement.node_class or "cpu", blocks=20, order_seed=7)
        plans.append(make_plan(parse_spec(text, CONTENT_TYPE)))
    assert plans[0].arms == plans[1].arms
    assert plans[0].blocks == plans[1].blocks


@pytest.mark.parametrize(
    ("workload", "place"),
    [("hybrid", "#/workload"), ({"recipe": "nothing"}, "#/workload/recipe"), ({"recipe": 7}, "#/workload/recipe")],
)
def test_a_wrong_workload_without_variants_is_named(workload, place):
    values = spec_values(workload=workload)
    del values["variants"]
    with pytest.raises(SpecError) as refused:
        spec_like(json.dumps(values).encode(), "application/json")
    assert [problem.pointer for problem in refused.value.problems] == [place]


def test_the_budget_grows_with_the_trials():
    like = make_spec(limits={"device_minutes": 30.0})  # 6 blocks of 3 arms
    spec = parse_spec(calibration_spec(like, node_class="cpu", blocks=36, order_seed=7), CONTENT_TYPE)
    assert spec.limits.device_minutes == pytest.approx(120)


def test_a_node_class_that_cannot_run_the_baseline_is_refused():
    with pytest.raises(SpecError, match="not meant for node class 'cpu'"):
        calibration_spec(catalog_spec("h200-gates"), node_class="cpu", blocks=20, order_seed=7)


def test_equal_arms_are_an_error_of_an_answer_and_unequal_ones_of_a_calibration():
    text = calibration_spec(catalog_spec("demo"), node_class="cpu", blocks=20, order_seed=7).decode()
    answer = parse_spec(text.replace("purpose: calibration\n", "").encode(), CONTENT_TYPE)
    assert "same configuration as the baseline" in resolve(answer).problems[0].detail
    other = parse_spec(
        text.replace("    gates:\n      schedule", "    gates:\n      psiv_cache: true\n      schedule").encode(),
        CONTENT_TYPE,
    )
    (problem,) = resolve(other).problems
    assert problem.pointer == "#/variants/repeat"
    assert "must repeat the baseline" in problem.detail


@pytest.mark.parametrize(
    "primary", [{"metric": "peak_allocated_gib", "margin": "0%"}, {"metric": "loss_val", "margin": "0.01 nats"}]
)
def test_a_metric_without_noise_of_the_machine_is_replaced_by_one_that_has_it(primary):
    like = make_spec(verdict__primary=primary)
    spec = parse_spec(calibration_spec(like, node_class="cpu", blocks=20, order_seed=7), CONTENT_TYPE)
    assert (spec.verdict.primary.metric, spec.verdict.primary.margin_pct) == ("tokens_per_s", 0.5)
