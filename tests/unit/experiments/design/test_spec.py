from typing import Any

import jsonschema_rs
import pytest

from ablate.experiments.catalog.files import read_catalog_file
from ablate.experiments.design.load import load_values
from ablate.experiments.design.spec import ablation_json_schema
from tests.factories import make_plan, make_spec, spec_values

SCHEMA = ablation_json_schema()


def accepts(values: Any) -> bool:
    return bool(jsonschema_rs.Draft202012Validator(SCHEMA).is_valid(values))


def test_schema_accepts_the_demos_and_refuses_a_lane_that_does_not_exist() -> None:
    assert accepts(load_values(read_catalog_file("demo"), "application/yaml"))
    assert accepts(load_values(read_catalog_file("demo-refused"), "application/yaml"))
    assert accepts(load_values(read_catalog_file("tpu-memory"), "application/yaml"))
    assert not accepts(spec_values(**{"variants__psiv-on__gates": {"lane": "rocm"}}))


@pytest.mark.parametrize(
    "changes",
    [
        {"bloks": 1},
        {"ablation": "Demo"},
        {"question": "a\nb"},
        {"variants": {}},
        {"variants": {"x": {"gates": {}}}},
        {"design__blocks": {"count": 5}},
        {"design__blocks": {"count": None}},
        {"design__blocks": {"looks": [6, 6]}},
        {"design__blocks": {"looks": [6, 10], "count": 10}},
        {"design__seeds": [1, 1]},
        {"placement__devices": 3},
        {"placement": {"node_class": "xla-cpu", "devices": 16}},
        {"placement__node_class": "gpu"},
        {"placement__node_class": "tpu-v7"},
        {"limits": {"trial": 20}},
        {"verdict__primary__margin": "0%"},
        {"verdict__primary": {"metric": "loss_val", "margin": "0%", "adopt_if": "1%"}},
        {"verdict__primary": {"metric": "tokens_per_s", "margin": "1 nats"}},
        {"verdict__primary": {"metric": "peak_allocated_gib", "margin": "1 GiB"}},
        {"verdict__require": [{"metric": "loss_val", "rule": "envelope"}]},
        {"verdict__require": [{"metric": "step_s", "max_delta": 1}]},
        {"design__seeds": 0},
        {"design__seeds": 65},
        {"verdict__primary": {"metric": "custom_calls", "margin": "1%"}},
        {"verdict__primary": {"metric": "compile_s", "margin": "0%"}},
        {"design__blocks": "automatic"},
        {"verdict__require": [{"metric": "compile_s", "rule": "identical"}]},
        {"verdict__require": [{"metric": "loss_val"}]},
        {"workload__overrides": {"seq_len": 1}},
        {"workload__recipe": "nothing"},
    ],
)
def test_schema_refuses_what_the_model_refuses(changes: dict[str, Any]) -> None:
    assert accepts(spec_values())
    assert not accepts(spec_values(**changes))


COMPILED = {"baseline": {"gates": {"compile": True}}, "variants": {"chunk-32": {"gates": {"chunk_size": 32}}}}


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict__primary": {"margin": "1%"}},
        {"verdict__primary": {"metric": "loss_val", "margin": "0%"}},
        {"verdict__primary": {"metric": "peak_allocated_gib", "margin": "0%"}, "design__blocks": {"count": 4}},
        {"verdict__primary": {"metric": "peak_allocated_gib", "margin": "1%", "adopt_if": "5%"}},
        {**COMPILED, "verdict__primary": {"metric": "compile_s", "margin": "2%"}},
    ],
)
def test_schema_accepts_what_the_model_accepts(changes: dict[str, Any]) -> None:
    assert make_plan(make_spec(**changes)).blocks
    assert accepts(spec_values(**changes))


def test_schema_and_model_accept_a_number_of_blocks_that_is_left_to_the_noise() -> None:
    assert make_spec(design__blocks="auto").design.blocks.auto
    assert accepts(spec_values(design__blocks="auto"))


def test_schema_describes_every_key() -> None:
    undescribed = [
        f"{name}.{key}"
        for name, part in {"AblationSpec": SCHEMA, **SCHEMA["$defs"]}.items()
        for key, value in part["properties"].items()
        if not ({"description", "$ref", "enum", "const"} & set(value))
        and key not in {"gates", "count", "looks", "primary", "require"}
    ]
    assert undescribed == []


def test_spec_digest_changes_with_every_value() -> None:
    digests = {
        make_spec(**changes).digest
        for changes in (
            {},
            {"question": "Another?"},
            {"design__order_seed": 8},
            {"verdict__primary__margin": "0.6%"},
            {"limits": {"priority": 51}},
            {"labels": {"a": "b"}},
        )
    }
    assert len(digests) == 6
