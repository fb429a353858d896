"""The page of the REST interface, made from the OpenAPI document: operations with a shell command each, and types."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from markupsafe import Markup, escape

from service.web.html import PageRoute, render, sent

Schema = Mapping[str, Any]

_JOINED = {"anyOf": Markup(" or "), "oneOf": Markup(" or "), "allOf": Markup(" and ")}
_LIMITS = {
    "format": "{}",
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
}
_FRESH = {"Idempotency-Key": "$(date +%s)-$RANDOM"}
"""Shell expressions for headers that need a new value in each request."""
_FILES = {
    "application/yaml": "spec.yaml",
    "application/json": "body.json",
    "application/x-tar": "bundle.tar",
    "application/gzip": "code.tar.gz",
}
"""File names by content type; the command sends the first that the operation accepts."""
_PROBLEMS_FROM = 400
"""Statuses from this one on come with a problem document."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a type, or one parameter of an operation."""

    name: str
    allowed: Markup
    required: bool
    description: Markup
    place: str = ""
    """Where a parameter goes: path, query, header."""
    fields: "tuple[Field, ...]" = ()
    """Fields of an object without a named type."""


def prose(text: str) -> Markup:
    """Return a description in HTML, with backticks as code."""
    parts = text.strip().split("`")
    return Markup().join(_code(part) if place % 2 else escape(part) for place, part in enumerate(parts))


def _code(value: Any) -> Markup:
    return Markup("<code>{}</code>").format(value if isinstance(value, str) else json.dumps(value))


def type_id(name: str) -> str:
    """Return the id of a type's section."""
    return f"type-{name}"


def fields_of(schema: Schema) -> tuple[Field, ...]:
    """Return the fields of an object; none for any other schema."""
    required = schema.get("required", ())
    return tuple(
        Field(
            name=name,
            allowed=allowed(field),
            required=name in required,
            description=prose(field.get("description", "")),
            fields=fields_of(field),
        )
        for name, field in schema.get("properties", {}).items()
    )


def allowed(schema: Schema) -> Markup:
    """Describe the values that a schema allows, and the default, with links to named types."""
    default = schema.get("default")
    values = Markup(", ").join([_kind(schema), *_limits(schema)])
    return values if default is None or default == [] else Markup("{}; default {}").format(values, _code(default))


def _kind(schema: Schema) -> Markup:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{}">{}</a>').format(type_id(name), name)
    for key, word in _JOINED.items():
        if key in schema:
            return word.join(map(allowed, schema[key]))
    if "const" in schema or "enum" in schema:
        return Markup(" or ").join(map(_code, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return _list(schema)
    return _object(schema) if schema.get("type") == "object" else escape(schema.get("type", "anything"))


def _list(schema: Schema) -> Markup:
    items = schema.get("prefixItems") or [schema.get("items", {})]
    return Markup("list of {}").format(Markup(", ").join(map(allowed, items)))


def _object(schema: Schema) -> Markup:
    """Describe an object without a named type."""
    if "properties" in schema:
        return Markup("object")
    values = list(schema.get("patternProperties", {}).values())
    if isinstance(schema.get("additionalProperties"), Mapping):
        values.append(schema["additionalProperties"])
    return (
        Markup("map of names to {}").format(Markup(" or ").join(map(allowed, values))) if values else Markup("object")
    )


def _limits(schema: Schema) -> Iterator[Markup]:
    for key, words in _LIMITS.items():
        if key in schema:
            yield escape(words.format(schema[key]))
    if schema.get("uniqueItems"):
        yield Markup("each once")
    patterns = [
        schema.get("pattern"),
        schema.get("propertyNames", {}).get("pattern"),
        *schema.get("patternProperties", ()),
    ]
    for pattern in filter(None, patterns):
        yield Markup("like {}").format(_code(pattern))


@dataclass(frozen=True, kw_only=True)
class OperationResponse:
    """One successful response."""

    status: str
    what: Markup
    """Its type, else its meaning."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation."""

    id: str
    method: str
    path: str
    summary: str
    description: Markup
    parameters: tuple[Field, ...]
    bodies: tuple[tuple[str, Markup], ...]
    """Pairs of a content type and its type."""
    examples: tuple[tuple[str, str], ...]
    """Pairs of a content type and a complete body, without equal bodies."""
    answers: tuple[OperationResponse, ...]
    problems: str
    """Statuses that come with a problem document."""
    curl: str


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The operations with one tag."""

    name: str
    description: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True, kw_only=True)
class NamedType:
    """A named type of the document."""

    id: str
    name: str
    description: Markup
    fields: tuple[Field, ...]
    allowed: Markup
    """The values of a type without fields."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """The whole page."""

    version: str
    description: str
    subjects: tuple[Subject, ...]
    types: tuple[NamedType, ...]


def describe(document: Mapping[str, Any]) -> Interface:
    """Describe an OpenAPI document."""
    operations = list(_operations(document))
    return Interface(
        version=document["info"]["version"],
        description=document["info"]["description"],
        subjects=tuple(
            Subject(
                name=tag["name"],
                description=tag["description"],
                operations=tuple(operation for subject, operation in operations if subject == tag["name"]),
            )
            for tag in document["tags"]
        ),
        types=tuple(_type(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
    )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, Operation]]:
    """Yield every operation with its subject, which is its last and narrowest tag."""
    for path, methods in document["paths"].items():
        for method, source in methods.items():
            yield source["tags"][-1], _operation(method.upper(), path, source)


def _operation(method: str, path: str, source: Mapping[str, Any]) -> Operation:
    body = source.get("requestBody", {}).get("content", {})
    return Operation(
        id=source["operationId"],
        method=method,
        path=path,
        summary=source["summary"],
        description=prose(source.get("description", "")),
        parameters=tuple(map(_parameter, source.get("parameters", ()))),
        bodies=tuple((kind, allowed(content["schema"])) for kind, content in body.items()),
        examples=tuple(_examples(body)),
        answers=tuple(_answers(source["responses"])),
        problems=", ".join(status for status in source["responses"] if int(status) >= _PROBLEMS_FROM),
        curl=" ".join(_curl(method, path, source)),
    )


def _parameter(source: Mapping[str, Any]) -> Field:
    schema = source["schema"]
    description = source.get("description") or schema.get("description", "")
    return Field(
        name=source["name"],
        allowed=allowed(schema),
        required=source.get("required", False),
        description=prose(description),
        place=source["in"],
    )


def _examples(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    shown: set[str] = set()
    for kind, content in body.items():
        example = content.get("example")
        text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
        if example is not None and text not in shown:
            shown.add(text)
            yield kind, text


def _answers(responses: Mapping[str, Any]) -> Iterator[OperationResponse]:
    for status, response in responses.items():
        if int(status) < _PROBLEMS_FROM:
            types = [allowed(one["schema"]) for one in response.get("content", {}).values() if one.get("schema")]
            yield OperationResponse(status=status, what=Markup(" or ").join(types) or prose(response["description"]))


def _curl(method: str, path: str, source: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a shell command that reads the address and a token from its environment."""
    parameters = [one for one in source.get("parameters", ()) if one.get("required")]
    yield "curl" if method == "GET" else f"curl -X {method}"
    if source.get("security"):
        yield '-H "Authorization: Bearer $ABLATE_TOKEN"'
    for one in parameters:
        if one["in"] == "header":
            yield f'-H "{one["name"]}: {_FRESH.get(one["name"]) or _value(one)}"'
    body = source.get("requestBody", {}).get("content", {})
    for kind in [kind for kind in _FILES if kind in body][:1]:
        yield f'-H "Content-Type: {kind}" --data-binary @{_FILES[kind]}'
    values = {one["name"]: _value(one) for one in parameters}
    filled = re.sub(r"{(\w+)}", lambda match: values[match[1]], path)
    query = "&".join(f"{one['name']}={_value(one)}" for one in parameters if one["in"] == "query")
    yield f'"$ABLATE_URL{filled}{"?" if query else ""}{query}"'


def _value(parameter: Mapping[str, Any]) -> str:
    """Return the example of a parameter, else its name in capitals."""
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


router = APIRouter(include_in_schema=False, route_class=PageRoute)


def writer(app: FastAPI) -> Callable[[], str]:
    """Return a function that renders the page of `app` once; the document never changes while it runs."""
    return cache(lambda: render("docs.html", interface=describe(app.openapi()), visitor=None))


@router.get("/docs")
def show_docs(request: Request) -> Response:
    """Show the interface to everybody; the operations themselves need a token."""
    return sent(request, request.app.state.write_docs())
