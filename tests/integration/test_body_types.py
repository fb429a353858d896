"""A field of a request takes the JSON types that the document names for it, and no other: true is no number."""

from collections.abc import Iterator
from typing import Any

from tests.api_stack import Api, api_fixture, bearer, served_api
from tests.golden.freeze_openapi import document

DOCUMENT = document()
OF_EACH_TYPE = {
    "boolean": True, "number": 0.5, "integer": 1, "string": "1", "array": [1], "object": {"a": 1}, "null": None,
}  # fmt: skip
ALSO = {"number": {"integer"}}
"""JSON schema's whole numbers are numbers."""


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a field may have."""
    schema = _resolved(schema)
    if "type" not in schema:
        return set().union(*map(_types, schema["anyOf"]))
    return {schema["type"]} | ALSO.get(schema["type"], set())


def _wrong_fields() -> Iterator[tuple[str, str, str, Any]]:
    """Yield (method, path, field, a value of a type that it may not have) for every field of every JSON body."""
    for path, item in DOCUMENT["paths"].items():
        for method, operation in item.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for field, schema in _resolved(body.get("schema", {})).get("properties", {}).items():
                for kind, value in OF_EACH_TYPE.items():
                    if kind not in _types(schema):
                        yield method, path, field, value


api = api_fixture(served_api, kinds=["sqlite"], scope="module", rate_limit_per_s=1e6, rate_limit_burst=10**6)


def test_a_value_of_another_type_is_refused_by_its_fields_name(api: Api) -> None:
    api.register()
    enrolment = api.client.post("/v1/enrolments", headers=api.admin, json={"node_class": "cpu", "uses": 1000})
    taken, seen = [], 0
    for method, path, field, value in _wrong_fields():
        seen += 1
        operation = DOCUMENT["paths"][path][method]
        token = api.worker_of("node-a") if "workers" in operation["tags"] else api.admin
        if path.endswith(":enrol"):
            token = bearer(enrolment.json()["secret"])
        url = path.replace("{name}", "node-a").replace("{key}", "a" * 64)
        url = url.replace("{attempt_id}", "01J00000000000000000000000").replace("{ablation_id}", "abl_" + "0" * 26)
        headers = {**token, "Idempotency-Key": f"types-{seen}"}
        answer = api.client.request(method, url, headers=headers, json={field: value})
        named = [error for error in answer.json().get("errors", []) if error["pointer"].startswith(f"#/{field}")]
        if answer.status_code not in (400, 422) or not named:
            taken.append((method, path, field, value, answer.status_code, answer.text[-300:]))
    assert seen > 150
    assert taken == []
