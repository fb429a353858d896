"""The comparison with the frozen REST interface finds planted breaking changes and accepts additions."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.golden.breaking_changes import breaking_changes
from tests.golden.freeze_openapi import GOLDEN, document, without_words

Edit = Callable[[dict[str, Any]], Any]

THING = {
    "type": "object",
    "required": ["name", "size"],
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "size": {"type": "integer", "minimum": 1},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Thing"}},
    },
}
CONTENT = {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}
DOCUMENT: dict[str, Any] = {
    "paths": {
        "/things": {
            "post": {
                "operationId": "addThing",
                "parameters": [{"in": "query", "name": "dry", "schema": {"type": "boolean"}}],
                "requestBody": {"content": CONTENT},
                "responses": {"200": {"content": CONTENT}, "409": {"headers": {"Retry-After": {}}}},
            }
        }
    },
    "components": {"schemas": {"Thing": THING}},
}


def post(changed: dict[str, Any]) -> Any:
    return changed["paths"]["/things"]["post"]


def thing(changed: dict[str, Any]) -> Any:
    return changed["components"]["schemas"]["Thing"]


BREAKING: dict[str, Edit] = {
    "POST /things: removed": lambda d: d["paths"].clear(),
    "operationId is other": lambda d: post(d).update(operationId="other"),
    "parameter dry removed": lambda d: post(d)["parameters"].clear(),
    "parameter dry is required": lambda d: post(d)["parameters"][0].update(required=True),
    "parameter new is required": lambda d: post(d)["parameters"].append(
        {"in": "query", "name": "new", "required": True, "schema": {"type": "string"}}
    ),
    "body is required": lambda d: post(d)["requestBody"].update(required=True),
    "answer 409 removed": lambda d: post(d)["responses"].pop("409"),
    "header Retry-After removed": lambda d: post(d)["responses"]["409"]["headers"].clear(),
    "200: application/json removed": lambda d: post(d)["responses"]["200"]["content"].clear(),
    "body/kind: removed": lambda d: thing(d)["properties"].pop("kind"),
    "body/kind: is required": lambda d: thing(d)["required"].append("kind"),
    "200:/size: may be absent": lambda d: thing(d)["required"].remove("size"),
    "body/size: type integer is now string": lambda d: thing(d)["properties"].update(size={"type": "string"}),
    "200:/size: type integer is now number": lambda d: thing(d)["properties"]["size"].update(type="number"),
    "body/kind: value 'b' removed": lambda d: thing(d)["properties"]["kind"]["enum"].remove("b"),
    "body/name: only ['x'] allowed": lambda d: thing(d)["properties"]["name"].update(enum=["x"]),
    "body/name: maxLength 40 is now 10": lambda d: thing(d)["properties"]["name"].update(maxLength=10),
    "body/size: minimum 1 is now 2": lambda d: thing(d)["properties"]["size"].update(minimum=2),
    "body/name: pattern None is now ^x$": lambda d: thing(d)["properties"]["name"].update(pattern="^x$"),
    "body/note: type null is now string": lambda d: thing(d)["properties"]["note"]["anyOf"].pop(),
    "200:/name: type string is now null": lambda d: thing(d)["properties"].update(
        name={"anyOf": [{"type": "string"}, {"type": "null"}]}
    ),
    "additional properties are rejected": lambda d: thing(d).update(additionalProperties=False),
}


@pytest.mark.parametrize("found", BREAKING)
def test_a_breaking_change_is_found(found: str) -> None:
    changed = copy.deepcopy(DOCUMENT)
    BREAKING[found](changed)
    assert any(found in change for change in breaking_changes(DOCUMENT, changed)), breaking_changes(DOCUMENT, changed)


HARMLESS: list[Edit] = [
    lambda d: d["paths"].update({"/more": d["paths"]["/things"]}),
    lambda d: post(d)["parameters"].append({"in": "query", "name": "new", "schema": {"type": "string"}}),
    lambda d: post(d)["responses"].update({"404": {}}),
    lambda d: post(d).update(description="Other words."),
    lambda d: thing(d)["properties"].update(more={"type": "string"}),
    lambda d: thing(d)["properties"]["kind"]["enum"].append("c"),
    lambda d: thing(d)["properties"]["name"].update(maxLength=80, description="Longer."),
]


@pytest.mark.parametrize("edit", HARMLESS)
def test_an_addition_is_no_breaking_change(edit: Edit) -> None:
    changed = copy.deepcopy(DOCUMENT)
    edit(changed)
    assert breaking_changes(DOCUMENT, changed) == []


def test_the_frozen_form_compares_as_the_whole_document() -> None:
    whole = document()
    assert breaking_changes(without_words(whole), whole) == []
    assert breaking_changes(whole, without_words(whole)) == []
    assert len(str(without_words(whole))) < len(str(whole)) / 2


def test_the_interface_breaks_no_client_of_the_frozen_one() -> None:
    hint = "if the change is wanted: make golden"
    assert breaking_changes(json.loads(GOLDEN.read_text()), document()) == [], hint


def test_every_operation_has_its_own_id_and_words() -> None:
    operations = [item for path in document()["paths"].values() for item in path.values()]
    ids = [item["operationId"] for item in operations]
    assert len(ids) == len(set(ids))
    assert all(item["tags"] and item["summary"] and item["description"] for item in operations)
