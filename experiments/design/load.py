"""Load a spec from bytes: JSON, YAML or TOML, within the limits that a public endpoint needs; write one as YAML.

All three give the same plain values: mappings with text keys, lists, text, numbers, booleans. Constructs that only one
format has (anchors, tags, dates, NaN, duplicate keys) are rejected. YAML is read from parser events. Its plain scalars
follow the YAML 1.2 core schema: `on`, `no`, dates and 1:30 are text, and 1e-3 is a number.
"""

import json
import math
import re
import tomllib
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ablate.experiments.credentials import form_of
from ablate.experiments.design.problems import from_validation, listed, pointer, shown
from ablate.experiments.design.recipes import RECIPES
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.spec_values import NAME_PATTERN, PACKAGE
from ablate.experiments.errors import SpecError, SpecProblem

MAX_SPEC_BYTES = 262_144
MAX_DEPTH = 16
MAX_VALUES = 4_096
"""Keys and entries of all mappings and lists together; the largest valid spec has about half as many."""
_MAX_DIGITS = 400
_MAX_BITS = int(_MAX_DIGITS * math.log2(10))

_Path = tuple[str | int, ...]

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_TOML_TEXT = re.compile(
    "|".join(
        (r'"{3}(?:\\.?|[^\\])*?(?:"{3}|\Z)', r"'{3}.*?(?:'{3}|\Z)", r'"(?:\\.?|[^"\\\n])*"?', r"'[^'\n]*'?", "#.*?$")
    ),
    re.DOTALL | re.MULTILINE,
)
"""A string or comment of TOML. One without an end matches too, so that each character is read once."""
_TOML_DEEP_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{MAX_DEPTH}}}")
_WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


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
            raise _refusal(detail, "remove it; a program gets a key by workload.secrets: [NAME] (docs/own-code.md)")
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
        raise _refusal(f"content type {shown(kind)} is not supported; allowed: {listed(_LOADERS)}")
    text = _decode(body)
    try:
        values = loader(text)
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(values, dict):
        raise _refusal(f"a spec is a mapping of keys, got {shown(values)}")
    _check_size(values)
    _check_numbers(values, ())
    return values


class _Dumper(yaml.SafeDumper):
    """Writes YAML that this reader reads back: the library quotes text that YAML 1.1 would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that stands at two places twice."""
        return True


def _quoted(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    ambiguous = text in _WORDS or _INT.fullmatch(text) or _FLOAT.fullmatch(text)
    style = '"' if not text.isprintable() else "'" if ambiguous else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)


def spec_yaml(values: Mapping[str, Any]) -> bytes:
    """Return plain values of a spec as YAML, which `load_values` reads as the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text.encode()


def _refusal(detail: str, hint: str | None = None, *, at: _Path = ()) -> SpecError:
    return SpecError([SpecProblem(pointer=pointer(*at), detail=detail, hint=hint)])


def _too_deep(at: _Path = ()) -> SpecError:
    return _refusal(f"the spec is nested too deeply; allowed: {MAX_DEPTH} levels", at=at)


def _decode(body: bytes) -> str:
    if len(body) > MAX_SPEC_BYTES:
        raise _refusal(f"the spec has {len(body)} bytes; allowed: {MAX_SPEC_BYTES}")
    if body.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _refusal("the spec is encoded as UTF-16; allowed: UTF-8", "save the file as UTF-8")
    if body.startswith(b"\xef\xbb\xbf"):
        raise _refusal("the spec begins with a byte order mark", "save the file as UTF-8 without BOM")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refusal(f"the spec is not UTF-8: byte {error.start} cannot be decoded") from error


def _too_many_digits(*, at: _Path = ()) -> SpecError:
    return _refusal(f"the spec holds a number with too many digits; allowed: {_MAX_DIGITS}", at=at)


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
            raise _refusal(f"the spec has too many keys and list entries; allowed: {MAX_VALUES}")
        if not inner:
            return
        level = inner
    raise _too_deep()


def _check_numbers(value: Any, path: _Path) -> None:
    """Reject infinity and NaN, which TOML has, and numbers too large for a float or for a message."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:  # hexadecimal TOML has no limit of its own
        raise _too_many_digits(at=path)
    if isinstance(value, float) and not math.isfinite(value):
        raise _refusal(f"the number is {value}, or too large; allowed: finite numbers", at=path)
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(inner, (*path, key))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise _duplicate(Counter(key for key, _ in pairs).most_common(1)[0][0])
    return values


def _duplicate(key: str, at: _Path = ()) -> SpecError:
    return _refusal(f"key {shown(key)} appears more than once", "keep one of them", at=at)


def _not_finite(word: str) -> None:
    raise _refusal(f"{word} is not a JSON number; allowed: finite numbers")


def _load_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite)
    except json.JSONDecodeError as error:
        raise _refusal(f"the spec is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise _too_many_digits() from error


def _load_toml(text: str) -> Any:
    if _TOML_DEEP_KEY.search(_TOML_TEXT.sub("s", text)):  # the parser's time grows with the square of a key's parts
        raise _too_deep()
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refusal(f"the spec is not TOML: {error}") from error
    except ValueError as error:
        raise _too_many_digits() from error


def _load_yaml(text: str) -> Any:
    bad = re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text)
    if bad:
        raise _refusal(f"control character U+{ord(bad.group()):04X} at position {bad.start()} is not allowed")
    try:
        return _document(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "unreadable"
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _refusal(f"the spec is not YAML: {problem}{where}") from error


def _document(events: Iterator[Any]) -> Any:
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        raise _refusal("the spec is empty", "begin with 'ablation: <name>'")
    value = _value(events, next(events), (), MAX_DEPTH)
    next(events)
    if not isinstance(next(events), yaml.StreamEndEvent):
        raise _refusal("the file holds more than one YAML document; allowed: one", "remove the '---' lines")
    return value


def _value(events: Iterator[Any], event: Any, path: _Path, depth: int) -> Any:
    if isinstance(event, yaml.AliasEvent):
        raise _refusal(f"YAML alias *{event.anchor} is not allowed", "write the value out", at=path)
    if event.anchor is not None:
        raise _refusal(f"YAML anchor &{event.anchor} is not allowed", "write the value out", at=path)
    if event.tag is not None:
        raise _refusal(f"YAML tag {shown(event.tag)} is not allowed", "write the plain value", at=path)
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, path)
    if depth == 0:
        raise _too_deep(path[:1])
    if isinstance(event, yaml.SequenceStartEvent):
        return _sequence(events, path, depth - 1)
    return _mapping(events, path, depth - 1)


def _sequence(events: Iterator[Any], path: _Path, depth: int) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_value(events, event, (*path, len(items)), depth))
    return items


def _mapping(events: Iterator[Any], path: _Path, depth: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(events, event, path)
        if key in values:
            raise _duplicate(key, at=(*path, key))
        values[key] = _value(events, next(events), (*path, key), depth)
    return values


def _key(events: Iterator[Any], event: Any, path: _Path) -> str:
    if not isinstance(event, yaml.ScalarEvent):
        raise _refusal("a key must be text, got a list, a mapping or an alias", at=path)
    key = _value(events, event, path, 0)
    if not isinstance(key, str):
        hint = f'write it in quotes: "{event.value}"'
        raise _refusal(f"key {shown(key)} is not text", hint, at=(*path, event.value))
    if key == "<<" and event.implicit[0]:
        raise _refusal("the YAML merge key '<<' is not allowed", "write the values out", at=path)
    return key


def _scalar(event: Any, path: _Path) -> Any:
    text = event.value
    if not event.implicit[0]:
        return text  # quoted
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_DIGITS and _FLOAT.fullmatch(text):
        raise _too_many_digits(at=path)
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


_LOADERS: Mapping[str, Callable[[str], Any]] = {
    "application/json": _load_json,
    "application/yaml": _load_yaml,
    "application/x-yaml": _load_yaml,
    "text/yaml": _load_yaml,
    "application/toml": _load_toml,
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
    return tuple(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models_in(inner)
