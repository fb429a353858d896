from collections import Counter
from dataclasses import replace

import pytest
import torch

from ablate.experiments.design.load import spec_of
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.recipes import HYBRID_REF_H200, NAM56R, NAM56R_QUARTER, RECIPES, Recipe
from ablate.experiments.errors import SpecError
from ablate.kernels.backends import NODE_CLASSES, Lane
from ablate.model.back_end_limits import check_back_ends
from ablate.model.counts import active_parameters, num_parameters
from ablate.model.hybrid import Hybrid
from tests.factories import make_spec


def test_reference_recipe_has_the_kernel_shape_of_the_published_measurements() -> None:
    model = HYBRID_REF_H200.config.model
    mamba = model.mamba
    shape = (model.num_value_heads, mamba.ngroups, mamba.d_state, mamba.headdim, mamba.mimo_rank, model.scan.chunk_size)
    assert shape == (16, 1, 64, 64, 4, 16)
    assert sum(letter in "MA" for letter in model.pattern) >= 8
    assert HYBRID_REF_H200.config.dtype == "bfloat16"


def test_nam56r_has_the_published_blocks_and_comes_within_five_percent_of_the_published_counts() -> None:
    """Counted without memory. The published 4.73 and 3.03 B are met to 0.5 % with 128 numbers in a state's head."""
    model = NAM56R.config.model
    assert Counter(model.pattern) == {"A": 13, "E": 22, "M": 13, "R": 4}
    assert [place + 1 for place, letter in enumerate(model.pattern) if letter == "R"] == [12, 24, 36, 48]
    assert (model.mlp_width, model.head_width, model.num_value_heads) == (18_944, 64, 112)
    total, active = num_parameters(model), active_parameters(model)
    assert (total, active) == (4_518_937_408, 2_823_390_016)
    assert round(total / 4.73e9 - 1, 3) == -0.045
    assert round(active / 3.03e9 - 1, 3) == -0.068
    assert abs((total - active) / (4.73e9 - 3.03e9) - 1) < 0.003  # experts of two matrices, not three
    nearest = replace(model, mamba=replace(model.mamba, d_state=128))
    assert abs(num_parameters(nearest) / 4.73e9 - 1) < 0.005
    assert abs(active_parameters(nearest) / 3.03e9 - 1) < 0.006
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Hybrid(model).parameters()) == total


def test_the_quarter_of_nam56r_is_its_first_13_blocks() -> None:
    quarter, whole = NAM56R_QUARTER.config.model, NAM56R.config.model
    assert quarter.pattern == "AEMEAEMEAEMRA"
    assert 4 * len(quarter.pattern) == len(whole.pattern)
    assert replace(quarter, pattern=whole.pattern) == whole
    for recipe in (NAM56R, NAM56R_QUARTER):
        check_back_ends(recipe.config)


@pytest.mark.parametrize("name", ["nam52", "NAM52"])
def test_a_model_without_a_published_geometry_is_refused_with_that_sentence(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of({**make_spec().model_dump(mode="json"), "workload": {"recipe": name}})
    assert [(problem.pointer, problem.detail) for problem in caught.value.problems] == [
        (
            "#/workload/recipe",
            "NAM52 has no published geometry; its depth of 52 and its 4.1 B parameters make no model",
        )
    ]


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
