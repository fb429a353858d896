"""Load a spec from bytes: JSON, YAML or TOML, with the limits that a public endpoint needs.

All three give the same plain values: mappings with text keys, lists, text, numbers, booleans. What one format can
say and another cannot (anchors, tags, dates, NaN, duplicate keys) is refused.
"""

import json
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from experiments.design import yaml_subset
from experiments.design.problems import from_validation, listed, pointer, shown
from experiments.design.spec import AblationSpec
from experiments.errors import SpecError, SpecProblem

MAX_SPEC_BYTES = 262_144
MAX_DEPTH = 16


def parse_spec(body: bytes, content_type: str) -> AblationSpec:
    """Return the spec in `body`; `content_type` may carry parameters such as a charset.

    Raises SpecError with every problem found, each with a pointer to the line that the user wrote.
    """
    values = load_values(body, content_type)
    try:
        return AblationSpec.model_validate(values)
    except ValidationError as error:
        raise SpecError(from_validation(error, _known_keys)) from error


def load_values(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the plain mapping in `body`; raises SpecError when it is too big, too deep, ambiguous or not a mapping."""
    kind = content_type.partition(";")[0].strip().lower()
    loader = _LOADERS.get(kind)
    if loader is None:
        raise _refused(f"content type {shown(kind)} is not supported; allowed: {listed(_LOADERS)}")
    text = _decode(body)
    try:
        values = loader(text)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(values, dict):
        raise _refused(f"a spec is a mapping of keys, got {shown(values)}")
    _check_depth(values)
    return values


def _refused(detail: str, *path: str | int, hint: str | None = None) -> SpecError:
    return SpecError([SpecProblem(pointer=pointer(*path), detail=detail, hint=hint)])


def _too_deep() -> SpecError:
    return _refused(f"the spec is nested too deeply; allowed: {MAX_DEPTH} levels")


def _decode(body: bytes) -> str:
    if len(body) > MAX_SPEC_BYTES:
        raise _refused(f"the spec has {len(body)} bytes; allowed: {MAX_SPEC_BYTES}")
    if body.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refused("the spec is encoded as UTF-16; allowed: UTF-8", hint="save the file as UTF-8")
    if body.startswith(b"\xef\xbb\xbf"):
        raise _refused("the spec begins with a byte order mark", hint="save the file as UTF-8 without BOM")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refused(f"the spec is not UTF-8: byte {error.start} cannot be decoded") from error


def _check_depth(values: Any) -> None:
    level = [values]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        if not inner:
            return
        level = inner
    raise _too_deep()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _refused(f"key {shown(twice)} is given more than once", hint="keep one of them")
    return values


def _not_finite(word: str) -> None:
    raise _refused(f"{word} is not a JSON number; allowed: finite numbers")


def _load_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        raise _refused(f"the spec is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise _refused("the spec holds an integer with too many digits") from error


def _load_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refused(f"the spec is not TOML: {error}") from error
    except ValueError as error:
        raise _refused("the spec holds an integer with too many digits") from error


def _load_yaml(text: str) -> Any:
    return yaml_subset.load(text, max_depth=MAX_DEPTH)


_LOADERS: Mapping[str, Callable[[str], Any]] = {
    "application/json": _load_json,
    "application/yaml": _load_yaml,
    "application/x-yaml": _load_yaml,
    "text/yaml": _load_yaml,
    "application/toml": _load_toml,
}

CONTENT_TYPES: tuple[str, ...] = tuple(_LOADERS)
"""Content types in which a spec may be submitted."""


def _known_keys(path: Sequence[str | int]) -> tuple[str, ...]:
    model: type[BaseModel] = AblationSpec
    parts = iter(path)
    for part in parts:
        annotation = model.model_fields[str(part)].annotation
        model = next(_models_in(annotation))
        if annotation is not model:
            next(parts, None)  # the name of a variant or the index of a requirement
    return tuple(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)
