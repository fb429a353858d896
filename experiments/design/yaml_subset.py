"""Read the part of YAML that a spec needs, from parser events: no anchors, aliases, tags, merge keys or duplicates.

Plain scalars follow the YAML 1.2 core schema, so `on`, `no`, dates and 1:30 are text, and 1e-3 is a number.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from experiments.design.problems import pointer, shown
from experiments.errors import SpecError, SpecProblem

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_MAX_DIGITS = 400

Path = tuple[str | int, ...]


def load(text: str, *, max_depth: int) -> Any:
    """Return the single document in `text` as plain values; raises SpecError with the pointer of what is refused."""
    bad = re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text)
    if bad:
        raise _refused((), f"control character U+{ord(bad.group()):04X} at position {bad.start()} is not allowed")
    try:
        return _document(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), max_depth)
    except yaml.YAMLError as error:
        raise _refused((), f"the spec is not YAML: {_where(error)}") from error


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "unreadable"
    return f"{problem} at line {mark.line + 1}, column {mark.column + 1}" if mark else str(problem)


def _refused(path: Path, detail: str, hint: str | None = None) -> SpecError:
    return SpecError([SpecProblem(pointer=pointer(*path), detail=detail, hint=hint)])


def _document(events: Iterator[Any], max_depth: int) -> Any:
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        raise _refused((), "the spec is empty", "begin with 'ablation: <name>'")
    value = _value(events, next(events), (), max_depth)
    next(events)
    if not isinstance(next(events), yaml.StreamEndEvent):
        raise _refused((), "the file holds more than one YAML document; allowed: one", "remove the '---' lines")
    return value


def _value(events: Iterator[Any], event: Any, path: Path, depth: int) -> Any:
    if isinstance(event, yaml.AliasEvent):
        raise _refused(path, f"YAML alias *{event.anchor} is not allowed", "write the value out")
    if event.anchor is not None:
        raise _refused(path, f"YAML anchor &{event.anchor} is not allowed", "write the value out")
    if event.tag is not None:
        raise _refused(path, f"YAML tag {shown(event.tag)} is not allowed", "write the plain value")
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, path)
    if depth == 0:
        raise _refused(path[:1], "the spec is nested too deeply")
    if isinstance(event, yaml.SequenceStartEvent):
        return _sequence(events, path, depth - 1)
    return _mapping(events, path, depth - 1)


def _sequence(events: Iterator[Any], path: Path, depth: int) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_value(events, event, (*path, len(items)), depth))
    return items


def _mapping(events: Iterator[Any], path: Path, depth: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(events, event, path)
        if key in values:
            raise _refused((*path, key), f"key {shown(key)} is given more than once", "keep one of them")
        values[key] = _value(events, next(events), (*path, key), depth)
    return values


def _key(events: Iterator[Any], event: Any, path: Path) -> str:
    if not isinstance(event, yaml.ScalarEvent):
        raise _refused(path, "a key must be text, got a list, a mapping or an alias")
    key = _value(events, event, path, 0)
    if not isinstance(key, str):
        raise _refused((*path, event.value), f"key {shown(key)} is not text", f'write it in quotes: "{event.value}"')
    if key == "<<" and event.implicit[0]:
        raise _refused(path, "the YAML merge key '<<' is not allowed", "write the values out")
    return key


def _scalar(event: Any, path: Path) -> Any:
    text = event.value
    if not event.implicit[0]:
        return text  # quoted
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _MAX_DIGITS and _FLOAT.fullmatch(text):
        raise _refused(path, f"a number of {len(text)} characters is not allowed")
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text
