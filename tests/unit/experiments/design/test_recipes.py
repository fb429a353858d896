import pytest

from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.recipes import HYBRID_REF_H200, RECIPES, Recipe
from ablate.kernels.backends import NODE_CLASSES, Lane
from tests.factories import make_spec


def test_reference_recipe_has_the_kernel_shape_of_the_published_measurements() -> None:
    model = HYBRID_REF_H200.config.model
    mamba = model.mamba
    shape = (model.num_value_heads, mamba.ngroups, mamba.d_state, mamba.headdim, mamba.mimo_rank, model.scan.chunk_size)
    assert shape == (16, 1, 64, 64, 4, 16)
    assert sum(letter in "MA" for letter in model.pattern) >= 8
    assert HYBRID_REF_H200.config.dtype == "bfloat16"


@pytest.mark.parametrize("seq_len", [4096, 16_384, 65_536])
def test_reference_recipe_plans_every_context_length(seq_len: int) -> None:
    spec = make_spec(
        workload__recipe="hybrid-ref-h200",
        workload__overrides={"seq_len": seq_len, "micro_batch": 65_536 // seq_len},
        placement__node_class="h200",
    )
    arms = make_plan(spec).arms
    assert {arm.config.data.seq_len for arm in arms} == {seq_len}
    assert {arm.gates["lane"] for arm in arms} == {"cuda"}


def test_another_lane_of_the_reference_recipe_needs_no_other_gate() -> None:
    spec = make_spec(
        workload__recipe="hybrid-ref-h200",
        placement__node_class="h200",
        variants={"reference": {"gates": {"lane": "reference"}}},
    )
    assert make_plan(spec).arms[1].gates["lane"] == "reference"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_recipe_asks_for_a_lane_that_its_node_classes_have(recipe: Recipe) -> None:
    lane: Lane = recipe.config.model.scan.lane
    meant = recipe.node_classes or [name for name, entry in NODE_CLASSES.items() if entry.device_type != "xla"]
    assert all(lane in NODE_CLASSES[name].lanes for name in meant)  # a spec for XLA names its only lane
