"""Load a spec from bytes: JSON or YAML, within the limits that a public endpoint needs.

Both give the same plain values: mappings with text keys, lists, text, numbers, booleans. Constructs that only one
format has (anchors, tags, dates, NaN, duplicate keys) are rejected.
"""

import json
import math
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ablate.experiments.credentials import form_of
from ablate.experiments.design.problems import (
    MAX_DEPTH,
    MAX_DIGITS,
    Place,
    duplicate_key,
    from_validation,
    listed,
    refusal,
    shown,
    too_deep,
    too_many_digits,
)
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.spec_values import NAME_PATTERN, PACKAGE
from ablate.experiments.errors import SpecError

MAX_SPEC_BYTES = 262_144
MAX_VALUES = 4_096
"""Keys and entries of all mappings and lists together; the largest valid spec has about half as many."""
_MAX_BITS = int(MAX_DIGITS * math.log2(10))


def _names_a_package(values: Mapping[str, Any]) -> bool:
    """Say whether a spec names a recipe that is not built in."""
    workload = values.get("workload")
    recipe = workload.get("recipe") if isinstance(workload, Mapping) else None
    return isinstance(recipe, str) and recipe not in RECIPES and re.fullmatch(NAME_PATTERN, recipe) is not None


def parse_spec(body: bytes, content_type: str) -> AblationSpec:
    """Return the spec in `body`; `content_type` may carry parameters such as a charset.

    Raises SpecError with all problems, each with a pointer to the user's line.
    """
    spec = spec_of(load_values(body, content_type))
    for number, line in enumerate(_decode(body).splitlines(), start=1):
        if words := form_of(line):
            detail = f"line {number} looks like {words}; the whole text of a spec is stored and shown, with comments"
            raise refusal(detail, "remove it; a program gets a key by workload.secrets: [NAME] (docs/own-code.md)")
    return spec


def spec_of(values: Mapping[str, Any]) -> AblationSpec:
    """Return the spec of plain values. Raises SpecError with all problems."""
    try:
        return AblationSpec.model_validate(values, context=PACKAGE if _names_a_package(values) else None)
    except ValidationError as error:
        raise SpecError(from_validation(error, _allowed_keys)) from error


def load_values(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the mapping in `body` as plain values.

    Raises SpecError when it is too big, too deep, ambiguous or not a mapping.
    """
    kind = content_type.partition(";")[0].strip().lower()
    loader = _LOADERS.get(kind)
    if loader is None:
        raise refusal(f"content type {shown(kind)} is not supported; allowed: {listed(_LOADERS)}")
    text = _decode(body)
    try:
        values = loader(text)
    except RecursionError:
        raise too_deep() from None
    if not isinstance(values, dict):
        raise refusal(f"a spec is a mapping of keys, got {shown(values)}")
    _check_size(values)
    _check_numbers(values, ())
    return values


def _decode(body: bytes) -> str:
    if len(body) > MAX_SPEC_BYTES:
        raise refusal(f"the spec has {len(body)} bytes; allowed: {MAX_SPEC_BYTES}")
    if body.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise refusal("the spec is encoded as UTF-16; allowed: UTF-8", "save the file as UTF-8")
    if body.startswith(b"\xef\xbb\xbf"):
        raise refusal("the spec begins with a byte order mark", "save the file as UTF-8 without BOM")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(f"the spec is not UTF-8: byte {error.start} cannot be decoded") from error


def _check_size(values: Any) -> None:
    level, count = [values], 0
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        count += len(inner)
        if count > MAX_VALUES:
            raise refusal(f"the spec has too many keys and list entries; allowed: {MAX_VALUES}")
        if not inner:
            return
        level = inner
    raise too_deep()


def _check_numbers(value: Any, path: Place) -> None:
    """Reject numbers too large for a float or for a message."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise too_many_digits(at=path)
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal(f"the number is {value}, or too large; allowed: finite numbers", at=path)
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(inner, (*path, key))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise duplicate_key(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return values


def _not_finite(word: str) -> None:
    raise refusal(f"{word} is not a JSON number; allowed: finite numbers")


def _load_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        raise refusal(f"the spec is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise too_many_digits() from error


def _load_yaml(text: str) -> Any:
    from ablate.experiments.design.spec_yaml import (
        load_yaml,  # lazy: a yaml.py beside a user's script hides the library
    )

    return load_yaml(text)


_LOADERS: Mapping[str, Callable[[str], Any]] = {
    "application/json": _load_json,
    "application/yaml": _load_yaml,
}

CONTENT_TYPES: tuple[str, ...] = tuple(_LOADERS)
"""Content types in which a spec may be submitted."""


def _allowed_keys(path: Sequence[str | int]) -> tuple[str, ...]:
    model: type[BaseModel] = AblationSpec
    parts = iter(path)
    for part in parts:
        annotation = model.model_fields[str(part)].annotation
        model = next(_models_in(annotation))
        if annotation is not model:
            next(parts, None)  # the name of a variant or the index of a requirement
    return tuple(field.alias or name for name, field in model.model_fields.items())


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)
