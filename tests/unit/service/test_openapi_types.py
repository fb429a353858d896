"""The OpenAPI document has types that generators of clients understand; `make clients` runs two of them."""

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from ablate.experiments.catalog.files import catalog_names, read_catalog_file
from ablate.experiments.design.load import load_values
from ablate.experiments.design.spec import ablation_json_schema
from ablate.service.http.openapi import _types_only
from tests.factories import command_values, spec_values
from tests.golden.freeze_openapi import document

SCHEMAS: dict[str, Any] = document()["components"]["schemas"]
OF_SPECS = ("AblationSpec", *ablation_json_schema()["$defs"])
UNIONS = ("anyOf", "oneOf", "allOf")


def parts(value: Any, place: str, *, is_names: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema with its place; the keys of `properties` are names."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from parts(inner, f"{place}/{index}")
    elif isinstance(value, dict):
        if not is_names:
            yield place, value
        for key, inner in value.items():
            if key not in ("examples", "default", "enum"):
                yield from parts(inner, f"{place}/{key}", is_names=key == "properties" and not is_names)


@pytest.mark.parametrize("name", OF_SPECS)
def test_types_of_a_spec_have_no_condition_and_no_value_without_a_type(name: str) -> None:
    for place, schema in parts(SCHEMAS[name], name):
        assert not schema.keys() & {"if", "then", "else", "not", "patternProperties"}, place
        assert not ("properties" in schema and schema.keys() & {*UNIONS}), place
        assert "type" in schema or not schema.keys() & {"enum", "const"}, place
        assert schema.get("type") != "boolean" or "enum" not in schema, place


def test_no_two_types_of_generated_clients_have_one_name() -> None:
    """Generators name an object without a name after its type and its title."""
    made = [
        (SCHEMAS[name].get("title", name) + schema["title"].title().replace(" ", ""), place)
        for name in SCHEMAS
        for place, schema in parts(SCHEMAS[name], name)
        if place != name and schema.get("type") == "object" and "title" in schema
    ]
    assert [(name, place) for name, place in made if name in SCHEMAS] == []
    assert len({name for name, _ in made}) == len(made)


def test_the_types_accept_every_spec_that_the_schema_accepts() -> None:
    types = {**_types_only(ablation_json_schema())}
    catalog = [load_values(read_catalog_file(name), "application/yaml") for name in catalog_names()]
    for values in (spec_values(), command_values(), *catalog):
        jsonschema_rs.Draft202012Validator(types).validate(values)
    assert not jsonschema_rs.Draft202012Validator(types).is_valid(spec_values(question=7))


def test_events_of_streams_have_schemas() -> None:
    paths = document()["paths"]
    for path, expected in (
        ("/v1/ablations/{ablation_id}/events", {"Event"}),
        ("/v1/trials/{trial_id}/log", {"LogPiece", "StreamEnd"}),
    ):
        references = paths[path]["get"]["responses"]["200"]["content"]["text/event-stream"]["x-event-data"]["anyOf"]
        assert {one["$ref"].rpartition("/")[2] for one in references} == expected
        assert expected <= SCHEMAS.keys()
    assert {"block_index", "arm", "subject", "from", "to"} <= SCHEMAS["Event"]["properties"].keys()
