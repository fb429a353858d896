"""An OpenAPI document as a judge of requests and answers: what it does not name is wrong."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import jsonschema_rs


@dataclass(frozen=True)
class Operation:
    """An operation of a document, and the values in the path of a request for it."""

    template: str
    values: dict[str, str]
    parameters: list[dict[str, Any]]
    body: dict[str, Any] | None
    answers: dict[str, dict[str, Any]]


class Document:
    """The operations of an OpenAPI 3.0 document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the operation for a path; None if the document has none."""
        for template, item in self._document["paths"].items():
            pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(template))
            found = re.fullmatch(pattern, path)
            if found and method.lower() in item:
                own = item[method.lower()]
                content = own.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
                answers = {
                    status: self._plain(answer["content"]["application/json"]["schema"])
                    for status, answer in own["responses"].items()
                }
                return Operation(
                    template=template,
                    values={name: unquote(value) for name, value in found.groupdict().items()},
                    parameters=[*item.get("parameters", ()), *own.get("parameters", ())],
                    body=None if content is None else _closed(self._plain(content)),
                    answers=answers,
                )
        return None

    def _plain(self, schema: Any) -> Any:
        """Return a schema without references and `nullable`, which JSON Schema lacks."""
        if isinstance(schema, list):
            return [self._plain(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            target: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            return self._plain(target)
        plain = {name: self._plain(value) for name, value in schema.items() if name != "nullable"}
        return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _closed(schema: Any) -> Any:
    """Return a schema that allows only the properties that it names."""
    if not isinstance(schema, dict):
        return schema
    own = {name: _closed(value) for name, value in schema.items() if name != "properties"}
    if "properties" in schema:
        own["properties"] = {name: _closed(value) for name, value in schema["properties"].items()}
        own.setdefault("additionalProperties", False)
    return own


def problems_of_request(
    operation: Operation, query: Mapping[str, str], content_type: str, body: Any | None
) -> list[str]:
    """Return what is wrong with a request."""
    problems = []
    for place, values in (("path", operation.values), ("query", query)):
        known = {one["name"]: one for one in operation.parameters if one["in"] == place}
        problems += [f"{place} parameter {name} is unknown" for name in values.keys() - known.keys()]
        problems += [f"{name} lacks" for name, one in known.items() if one.get("required") and name not in values]
        for name in values.keys() & known.keys():
            problems += _problems(_typed(values[name], known[name]["schema"]), known[name]["schema"], name)
    if operation.body is None:
        return problems + ["it has a body"] * (body is not None)
    if content_type.partition(";")[0] != "application/json":
        problems.append(f"its content type is {content_type!r}")
    return problems + _problems(body, operation.body, "body")


def problems_of_answer(operation: Operation, status: int, body: Any) -> list[str]:
    """Return what is wrong with a successful answer."""
    schema = operation.answers.get(str(status))
    return [f"{status} is no answer"] if schema is None else _problems(body, schema, "answer")


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    return int(text) if schema.get("type") == "integer" and text.isdecimal() else text


def _problems(value: Any, schema: Any, name: str) -> list[str]:
    return [
        f"{'/'.join(map(str, [name, *error.instance_path]))}: {error.message}"
        for error in jsonschema_rs.Draft202012Validator(schema).iter_errors(value)
    ]
