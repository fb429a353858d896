"""The OpenAPI document as people read it: operations by subject with a line for the shell each, and the types."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from service.web.schema_words import Field, allowed, fields_of, prose, type_id

_FRESH = {"Idempotency-Key": "$(date +%s)-$RANDOM"}
"""Headers whose value is a new one each time, as a shell makes it."""
_FILES = {"application/yaml": "spec.yaml", "application/json": "body.json", "application/x-tar": "bundle.tar"}
"""Bodies as the line for the shell sends them, the first that an operation takes."""
_PROBLEMS_FROM = 400


@dataclass(frozen=True, kw_only=True)
class OperationResponse:
    """What may come back."""

    status: str
    what: Markup
    """Its type, else what it means."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One thing that can be asked."""

    id: str
    method: str
    path: str
    summary: str
    description: Markup
    parameters: tuple[Field, ...]
    bodies: tuple[tuple[str, Markup], ...]
    """(content type, what it holds)."""
    examples: tuple[tuple[str, str], ...]
    """(content type, a complete body); equal bodies once."""
    answers: tuple[OperationResponse, ...]
    problems: str
    """Statuses that come with a problem document."""
    curl: str


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Operations that belong together."""

    name: str
    description: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True, kw_only=True)
class NamedType:
    """A type of the document."""

    id: str
    name: str
    description: Markup
    fields: tuple[Field, ...]
    allowed: Markup
    """Which values there are, of a type without fields."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """The whole page."""

    version: str
    description: str
    subjects: tuple[Subject, ...]
    types: tuple[NamedType, ...]


def describe(document: Mapping[str, Any]) -> Interface:
    """Describe an OpenAPI document."""
    found = list(_operations(document))
    return Interface(
        version=document["info"]["version"],
        description=document["info"]["description"],
        subjects=tuple(
            Subject(
                name=tag["name"],
                description=tag["description"],
                operations=tuple(operation for own, operation in found if own == tag["name"]),
            )
            for tag in document["tags"]
        ),
        types=tuple(_type(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
    )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, Operation]]:
    """Yield every operation with its subject: the last of its tags, which is the narrowest."""
    for path, methods in document["paths"].items():
        for method, asked in methods.items():
            yield asked["tags"][-1], _operation(method.upper(), path, asked)


def _operation(method: str, path: str, asked: Mapping[str, Any]) -> Operation:
    body = asked.get("requestBody", {}).get("content", {})
    return Operation(
        id=asked["operationId"],
        method=method,
        path=path,
        summary=asked["summary"],
        description=prose(asked.get("description", "")),
        parameters=tuple(map(_parameter, asked.get("parameters", ()))),
        bodies=tuple((kind, allowed(told["schema"])) for kind, told in body.items()),
        examples=tuple(_examples(body)),
        answers=tuple(_answers(asked["responses"])),
        problems=", ".join(status for status in asked["responses"] if int(status) >= _PROBLEMS_FROM),
        curl=" ".join(_curl(method, path, asked)),
    )


def _parameter(given: Mapping[str, Any]) -> Field:
    schema = given["schema"]
    description = given.get("description") or schema.get("description", "")
    return Field(
        name=given["name"],
        allowed=allowed(schema),
        required=given.get("required", False),
        description=prose(description),
        place=given["in"],
    )


def _examples(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    shown: set[str] = set()
    for kind, told in body.items():
        example = told.get("example")
        text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
        if example is not None and text not in shown:
            shown.add(text)
            yield kind, text


def _answers(responses: Mapping[str, Any]) -> Iterator[OperationResponse]:
    for status, told in responses.items():
        if int(status) < _PROBLEMS_FROM:
            types = [allowed(one["schema"]) for one in told.get("content", {}).values() if one.get("schema")]
            yield OperationResponse(status=status, what=Markup(" or ").join(types) or prose(told["description"]))


def _curl(method: str, path: str, asked: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of the line that asks this from a shell with the address and a token in its environment."""
    parameters = [one for one in asked.get("parameters", ()) if one.get("required")]
    yield "curl" if method == "GET" else f"curl -X {method}"
    if asked.get("security"):
        yield '-H "Authorization: Bearer $ABLATE_TOKEN"'
    for one in parameters:
        if one["in"] == "header":
            yield f'-H "{one["name"]}: {_FRESH.get(one["name"]) or _value(one)}"'
    body = asked.get("requestBody", {}).get("content", {})
    for kind in [kind for kind in _FILES if kind in body][:1]:
        yield f'-H "Content-Type: {kind}" --data-binary @{_FILES[kind]}'
    given = {one["name"]: _value(one) for one in parameters}
    filled = re.sub(r"{(\w+)}", lambda found: given[found[1]], path)
    query = "&".join(f"{one['name']}={_value(one)}" for one in parameters if one["in"] == "query")
    yield f'"$ABLATE_URL{filled}{"?" if query else ""}{query}"'


def _value(parameter: Mapping[str, Any]) -> str:
    """Return the example of a parameter, else its name for the reader to replace."""
    schema = parameter["schema"]
    examples = parameter.get("examples") or schema.get("examples") or [parameter["name"].upper()]
    return str(examples[0])


def _type(name: str, schema: Mapping[str, Any]) -> NamedType:
    fields = fields_of(schema)
    return NamedType(
        id=type_id(name),
        name=name,
        description=prose(schema.get("description", "")),
        fields=fields,
        allowed=escape("") if fields else allowed(schema),
    )
