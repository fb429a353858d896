"""What a JSON Schema allows, in words that link to the types they name, for the page of the REST interface."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

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
_NAMED_KEYS = "propertyNames"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of a type, or one parameter of an operation."""

    name: str
    allowed: Markup
    required: bool
    description: Markup
    place: str = ""
    """Where a parameter goes: path, query, header."""


def prose(text: str) -> Markup:
    """Return a description with what stands between backticks as code."""
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
            allowed=allowed(found),
            required=name in required,
            description=prose(found.get("description", "")),
        )
        for name, found in schema.get("properties", {}).items()
    )


def allowed(schema: Schema) -> Markup:
    """Say which values a schema allows, and the default."""
    default = schema.get("default")
    said = Markup(", ").join([_kind(schema), *_limits(schema)])
    return said if default is None or default == [] else Markup("{}; default {}").format(said, _code(default))


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
    """Say what an object without a name of its own holds."""
    if "properties" in schema:
        return Markup("object of {}").format(_inline(schema))
    values = list(schema.get("patternProperties", {}).values())
    if isinstance(schema.get("additionalProperties"), Mapping):
        values.append(schema["additionalProperties"])
    return (
        Markup("map of names to {}").format(Markup(" or ").join(map(allowed, values))) if values else Markup("object")
    )


def _inline(schema: Schema) -> Markup:
    return Markup(", ").join(Markup("{}: {}").format(_code(one.name), one.allowed) for one in fields_of(schema))


def _limits(schema: Schema) -> Iterator[Markup]:
    for key, words in _LIMITS.items():
        if key in schema:
            yield escape(words.format(schema[key]))
    if schema.get("uniqueItems"):
        yield Markup("each once")
    patterns = [schema.get("pattern"), schema.get(_NAMED_KEYS, {}).get("pattern"), *schema.get("patternProperties", ())]
    for pattern in filter(None, patterns):
        yield Markup("like {}").format(_code(pattern))
