"""Variants that differ in values of the model or the optimiser, not in gates."""

from typing import Any

import pytest

from ablate.experiments.analysis.evidence import weakest_claim
from ablate.experiments.design.arms import resolve
from ablate.experiments.design.checks import other_model
from ablate.experiments.design.gate import Claim, read_field
from ablate.experiments.design.plan import make_plan, questions
from ablate.experiments.design.recipes import OF_AN_ARM, OVERRIDES, RECIPES, SHARED
from ablate.experiments.reporting.changes import arm_changes
from ablate.model.blocks import BLOCKS
from tests.factories import make_spec

OTHER: dict[str, Any] = {
    "pattern": "MMFF",
    "d_model": 256,
    "expand": 1,
    "headdim": 64,
    "d_state": 16,
    "ngroups": 2,
    "mimo_rank": 2,
    "rope_fraction": 1.0,
    "a_activation": "softplus",
    "dt_min": 0.01,
    "dt_max": 0.2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "qk_norm": "rms",
    "window": 64,
    "latent_rank": 16,
    "rope_theta": 500_000.0,
    "softcap": 10.0,
    "mlp_ratio": 4.0,
    "num_experts": 16,
    "top_k": 4,
    "expert_width": 64,
    "shared_width": 0,
    "balance_rate": 0.1,
    "state_heads": 2,
    "key_width": 64,
    "value_width": 8,
    "conv_width": 2,
    "norm": "layer",
    "learning_rate": 1e-4,
    "lr_warmup_steps": 50,
    "beta1": 0.8,
    "beta2": 0.99,
    "weight_decay": 0.5,
    "grad_clip": 0.1,
    "loss_chunk_tokens": 128,
    "micro_batch": 3,
    "seq_len": 128,
    "documents": "joined",
    "vocab_size": 512,
    "max_corpus_mib": 4.0,
    "val_fraction": 0.1,
    "corpus": "/data/corpus",
    "second_corpus": "/data/other",
    "second_share": 0.3,
}
"""A value of each that `hybrid-tiny` does not have."""


def with_values(**values: Any) -> Any:
    return make_spec(variants={"other": {"overrides": values}})


def test_every_value_is_an_arms_own_or_shared() -> None:
    assert {*OF_AN_ARM, *SHARED} == OVERRIDES.keys()
    assert OTHER.keys() == {*OF_AN_ARM}


@pytest.mark.parametrize("name", OF_AN_ARM)
def test_a_variant_may_differ_in_a_value_of_model_or_optimiser(name: str) -> None:
    gates = {"gates": {"loss": "chunked"}} if name == "loss_chunk_tokens" else {}
    spec = make_spec(baseline=gates, variants={"other": {"overrides": {name: OTHER[name]}}})
    used = next((kind for kind, block in BLOCKS.items() if OVERRIDES[name].path.startswith(block.fields)), "M")
    if used not in RECIPES["hybrid-tiny"].config.model.pattern:
        spec = make_spec(workload__overrides={"pattern": f"MM{used}F"}, variants=spec.variants)
    if name == "second_share":
        spec = make_spec(workload__overrides={"second_corpus": "torch-python"}, variants=spec.variants)
    base, other = resolve(spec).arms
    configs = [arm.config.with_seed(0) for arm in (base, other)]
    path = OVERRIDES[name].path
    recipe = RECIPES[spec.workload.recipe or ""].config
    assert [read_field(config, path) for config in configs] == [read_field(recipe, path), OTHER[name]]
    changed = {"micro_batch": 3} if name == "micro_batch" else {}
    assert other.gates == {**base.gates, **changed}
    assert other.digest != base.digest
    assert weakest_claim(other, base) is Claim.CHANGES_MODEL
    difference = other_model(other, base)
    assert difference is not None
    assert difference.startswith(f"{name} ")
    assert difference.count("instead of") == 1
    assert name in [change.name for change in arm_changes(other, base)]


def test_values_and_gates_go_together_and_make_another_question() -> None:
    both = make_spec(variants={"other": {"overrides": {"learning_rate": 1e-4}, "gates": {"loss": "chunked"}}})
    gate = make_spec(variants={"other": {"gates": {"loss": "chunked"}}})
    slower = make_spec(variants={"other": {"overrides": {"learning_rate": 1e-5}, "gates": {"loss": "chunked"}}})
    asked = [questions(spec, make_plan(spec))["other"] for spec in (both, gate, slower)]
    assert len(set(asked)) == 3
    again = make_spec(variants={"other": {"overrides": {"learning_rate": 1e-5}, "gates": {"loss": "chunked"}}})
    assert questions(again, make_plan(again))["other"] == asked[2]


def test_equal_values_are_no_variant() -> None:
    rate = RECIPES["hybrid-tiny"].config.optim.learning_rate
    (problem,) = resolve(with_values(learning_rate=rate)).problems
    assert "the same configuration as the baseline" in problem.detail


@pytest.mark.parametrize("name", SHARED)
def test_validation_rows_and_threads_are_the_same_for_all_arms(name: str) -> None:
    (problem,) = resolve(with_values(**{name: 512})).problems
    assert problem.pointer == f"#/variants/other/overrides/{name}"
    assert problem.hint == "set it under workload.overrides"


@pytest.mark.parametrize(("workload", "own", "row"), [({}, 128, 256), ({"val_seq_len": 64}, 128, 64), ({}, 256, 256)])
def test_arms_with_rows_of_other_lengths_validate_on_equal_rows(workload: dict[str, Any], own: int, row: int) -> None:
    more = {"learning_rate": 0.1}
    spec = make_spec(workload__overrides=workload, variants={"other": {"overrides": {"seq_len": own, **more}}})
    base, other = (arm.config.with_seed(0).data for arm in resolve(spec).arms)
    assert (base.val_row, other.val_row, other.seq_len) == (row, row, own)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"second_share": 0.1}, "allowed without a second_corpus: 0"),
        ({"second_corpus": "torch-headers"}, "as the corpus; allowed: another one"),
        ({"seq_len": 8}, "chunk_size"),
    ],
)
def test_data_that_cannot_be_is_refused_at_the_variant(values: dict[str, Any], words: str) -> None:
    (problem,) = resolve(with_values(**values)).problems
    assert problem.pointer.startswith("#/")
    assert words in problem.detail


@pytest.mark.parametrize(("baseline", "whose"), [({"micro_batch": 4}, "the baseline"), ({}, "this variant")])
def test_a_batch_is_set_in_one_place(baseline: dict[str, Any], whose: str) -> None:
    gates = {} if baseline else {"micro_batch": 4}
    variant = {"overrides": {"micro_batch": 3}} | ({"gates": gates} if gates else {})
    (problem,) = resolve(make_spec(baseline={"gates": baseline}, variants={"other": variant})).problems
    assert problem.pointer == "#/variants/other/overrides/micro_batch"
    assert whose in problem.detail


@pytest.mark.parametrize(
    ("workload", "values"),
    [
        ({}, {"loss_chunk_tokens": 128}),
        ({"pattern": "AF"}, {"rope_fraction": 1.0}),
        ({"pattern": "AF"}, {"headdim": 64, "dt_min": 0.01}),
        ({"pattern": "MF"}, {"softcap": 10.0}),
        ({"pattern": "MA"}, {"mlp_ratio": 4.0}),
    ],
)
def test_values_without_effect_are_no_variant(workload: dict[str, Any], values: dict[str, Any]) -> None:
    spec = make_spec(
        workload__overrides=workload, baseline={}, variants={"other": {"overrides": values}}, verdict__require=[]
    )
    (problem,) = resolve(spec).problems
    assert problem.pointer == "#/variants/other"
    assert problem.detail.endswith(f"; without effect in this model: {', '.join(values)}")


def test_values_that_do_not_fit_the_model_are_refused_where_they_stand() -> None:
    (problem,) = resolve(with_values(d_model=100)).problems
    assert problem.pointer.startswith("#/variants/other/overrides")
    assert "headdim" in problem.detail
