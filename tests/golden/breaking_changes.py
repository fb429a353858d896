"""Breaking changes between two OpenAPI documents: the changes that a client of the old one would notice.

A request may accept more and an answer may hold more. A request must not accept less, an answer must not lose anything.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_LIMITS = ("maximum", "maxLength", "maxItems", "maxProperties", "minimum", "minLength", "minItems", "exclusiveMinimum")
_INFINITE = float("inf")


def breaking_changes(old: Schema, new: Schema) -> list[str]:
    """Return every breaking change from document `old` to document `new`, each with its place."""
    return list(_Comparison(old, new).changes())


class _Comparison:
    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new
        self._active: set[tuple[int, int, bool]] = set()
        """Schemas that are being compared; a schema may contain itself."""

    def changes(self) -> Iterator[str]:
        for path, methods in self._old["paths"].items():
            for method, operation in methods.items():
                place, now = f"{method.upper()} {path}", self._new["paths"].get(path, {}).get(method)
                if now is None:
                    yield f"{place}: removed"
                    continue
                if operation["operationId"] != now["operationId"]:
                    yield f"{place}: operationId is {now['operationId']}"
                yield from self._parameters(operation, now, place)
                yield from self._content(operation.get("requestBody", {}), now.get("requestBody", {}), place, True)
                for status, answer in operation["responses"].items():
                    if status not in now["responses"]:
                        yield f"{place}: answer {status} removed"
                        continue
                    yield from self._content(answer, now["responses"][status], f"{place} {status}", False)

    def _parameters(self, old: Schema, new: Schema, place: str) -> Iterator[str]:
        before, now = ({(p["in"], p["name"]): p for p in one.get("parameters", ())} for one in (old, new))
        for key, parameter in before.items():
            if key not in now:
                yield f"{place}: parameter {key[1]} removed"
                continue
            yield from self._schema(parameter["schema"], now[key]["schema"], f"{place}: parameter {key[1]}", True)
        for key, parameter in now.items():
            if parameter.get("required") and not before.get(key, {}).get("required"):
                yield f"{place}: parameter {key[1]} is required"

    def _content(self, old: Schema, new: Schema, place: str, is_request: bool) -> Iterator[str]:
        if is_request and new.get("required") and not old.get("required"):
            yield f"{place}: body is required"
        for kind, media in old.get("content", {}).items():
            if kind not in new.get("content", {}):
                yield f"{place}: {kind} removed"
                continue
            where = f"{place}: body" if is_request else f"{place}:"
            yield from self._schema(media.get("schema", {}), new["content"][kind].get("schema", {}), where, is_request)
        yield from (
            f"{place}: header {name} removed" for name in set(old.get("headers", {})) - set(new.get("headers", {}))
        )

    def _schema(self, old: Schema, new: Schema, place: str, is_request: bool) -> Iterator[str]:
        """Compare two schemas; every alternative that must stay needs a partner without a breaking change."""
        before, now = list(_alternatives(old, self._old)), list(_alternatives(new, self._new))
        for one in before if is_request else now:
            pairs = ((one, other) if is_request else (other, one) for other in (now if is_request else before))
            found = [list(self._alternative(*pair, place, is_request)) for pair in pairs]
            yield from min(found, key=len, default=[])

    def _alternative(self, old: Schema, new: Schema, place: str, is_request: bool) -> Iterator[str]:
        key = (id(old), id(new), is_request)
        if key in self._active:
            return
        self._active.add(key)
        yield from _value_changes(old, new, place, is_request)
        before, now = old.get("properties", {}), new.get("properties", {})
        yield from (f"{place}/{name}: removed" for name in before if name not in now)
        required = set(new.get("required", ())) - set(old.get("required", ()))
        optional = set(old.get("required", ())) - set(new.get("required", ()))
        yield from (f"{place}/{name}: is required" for name in sorted(required) if is_request)
        yield from (f"{place}/{name}: may be absent" for name in sorted(optional & set(now)) if not is_request)
        for name in before.keys() & now.keys():
            yield from self._schema(before[name], now[name], f"{place}/{name}", is_request)
        for word in ("items", "additionalProperties"):
            if isinstance(old.get(word), Mapping) and isinstance(new.get(word), Mapping):
                yield from self._schema(old[word], new[word], f"{place}/{word}", is_request)
        if (
            is_request
            and old.get("additionalProperties", True) is not False
            and new.get("additionalProperties") is False
        ):
            yield f"{place}: additional properties are rejected"
        self._active.discard(key)


def _value_changes(old: Schema, new: Schema, place: str, is_request: bool) -> Iterator[str]:
    wide, narrow = (new, old) if is_request else (old, new)  # the one that has to accept every value of the other
    if (
        "type" in wide
        and wide["type"] != narrow.get("type")
        and (wide["type"], narrow.get("type")) != ("number", "integer")
    ):
        yield f"{place}: type {old.get('type')} is now {new.get('type')}"
    if not is_request:
        return
    values = _enum(new)
    if values and not _enum(old):
        yield f"{place}: only {values} allowed"
    yield from (f"{place}: value {value!r} removed" for value in _enum(old) if values and value not in values)
    for word in _LIMITS:
        sign = -1 if word.startswith("min") else 1
        if sign * new.get(word, sign * _INFINITE) < sign * old.get(word, sign * _INFINITE):
            yield f"{place}: {word} {old.get(word)} is now {new.get(word)}"
    if new.get("pattern", old.get("pattern")) != old.get("pattern"):
        yield f"{place}: pattern {old.get('pattern')} is now {new.get('pattern')}"


def _enum(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _alternatives(schema: Schema, document: Schema) -> Iterator[Schema]:
    """Yield the schemas of which a value fits one, with references resolved and lists of types split."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if options := schema.get("anyOf", schema.get("oneOf")):
        for option in options:
            yield from _alternatives(option, document)
    elif isinstance(schema.get("type"), list):
        yield from ({**schema, "type": kind} for kind in schema["type"])
    else:
        yield schema
