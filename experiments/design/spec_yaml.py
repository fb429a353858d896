"""Read, write and edit the YAML of a spec.

It is read from parser events. Plain scalars follow the YAML 1.2 core schema: `on`, `no`, dates and 1:30 are text, and
1e-3 is a number. The other formats need no YAML library, so a user's script with a yaml.py beside it can use them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from ablate.experiments.design.problems import (
    MAX_DEPTH,
    MAX_DIGITS,
    Place,
    duplicate_key,
    refusal,
    shown,
    too_deep,
    too_many_digits,
)

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


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
    """Return plain values of a spec as YAML, which `load_yaml` reads as the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text.encode()


def load_yaml(text: str) -> Any:
    """Return the plain values of a text. Raises SpecError."""
    bad = re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text)
    if bad:
        raise refusal(f"control character U+{ord(bad.group()):04X} at position {bad.start()} is not allowed")
    try:
        return _document(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "unreadable"
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise refusal(f"the spec is not YAML: {problem}{where}") from error


def _document(events: Iterator[Any]) -> Any:
    next(events)
    if isinstance(next(events), yaml.StreamEndEvent):
        raise refusal("the spec is empty", "begin with 'ablation: <name>'")
    value = _value(events, next(events), (), MAX_DEPTH)
    next(events)
    if not isinstance(next(events), yaml.StreamEndEvent):
        raise refusal("the file holds more than one YAML document; allowed: one", "remove the '---' lines")
    return value


def _value(events: Iterator[Any], event: Any, path: Place, depth: int) -> Any:
    if isinstance(event, yaml.AliasEvent):
        raise refusal(f"YAML alias *{event.anchor} is not allowed", "write the value out", at=path)
    if event.anchor is not None:
        raise refusal(f"YAML anchor &{event.anchor} is not allowed", "write the value out", at=path)
    if event.tag is not None:
        raise refusal(f"YAML tag {shown(event.tag)} is not allowed", "write the plain value", at=path)
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, path)
    if depth == 0:
        raise too_deep(path[:1])
    if isinstance(event, yaml.SequenceStartEvent):
        return _sequence(events, path, depth - 1)
    return _mapping(events, path, depth - 1)


def _sequence(events: Iterator[Any], path: Place, depth: int) -> list[Any]:
    items: list[Any] = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        items.append(_value(events, event, (*path, len(items)), depth))
    return items


def _mapping(events: Iterator[Any], path: Place, depth: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(events, event, path)
        if key in values:
            raise duplicate_key(key, at=(*path, key))
        values[key] = _value(events, next(events), (*path, key), depth)
    return values


def _key(events: Iterator[Any], event: Any, path: Place) -> str:
    if not isinstance(event, yaml.ScalarEvent):
        raise refusal("a key must be text, got a list, a mapping or an alias", at=path)
    key = _value(events, event, path, 0)
    if not isinstance(key, str):
        hint = f'write it in quotes: "{event.value}"'
        raise refusal(f"key {shown(key)} is not text", hint, at=(*path, event.value))
    if key == "<<" and event.implicit[0]:
        raise refusal("the YAML merge key '<<' is not allowed", "write the values out", at=path)
    return key


def _scalar(event: Any, path: Place) -> Any:
    text = event.value
    if not event.implicit[0]:
        return text  # quoted
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_DIGITS and _FLOAT.fullmatch(text):
        raise too_many_digits(at=path)
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def edited(text: str, scalars: Mapping[tuple[str, ...], str]) -> str:
    """Replace the values at the places in a YAML text, whose other lines and comments stay.

    A text that this parser does not read comes back unchanged.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return text
    try:
        edits = [(_node_at(root, place), scalar) for place, scalar in scalars.items()]
    except LookupError:  # an arm had no code of its own
        return text
    for node, scalar in sorted(edits, key=lambda edit: -edit[0].start_mark.index):
        begin, end = node.start_mark.index, _end_of(node)
        new = scalar + ("\n" if text[begin:end].endswith("\n") else "")
        if _is_block_list(node):  # it may stand in the column of its key, where no other value may
            begin, new = len(text[:begin].rstrip()), f" {new}"
        text = text[:begin] + new + text[end:]
    return text


def labelled(text: str, wanted: object, added: Mapping[str, str]) -> str:
    """Return a YAML text with all its labels in one line if some are `added`."""
    if not added:
        return text
    line = json.dumps(wanted, ensure_ascii=False)
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)  # `edited` or the reader of the spec has read it
    node = next((value for key, value in root.value if key.value == "labels"), None)
    if node is None:
        return f"{text}{'' if text.endswith(chr(10)) else chr(10)}labels: {line}\n"
    begin, end = node.start_mark.index, _end_of(node)
    return text[:begin] + line + ("\n" if text[begin:end].endswith("\n") else "") + text[end:]


def _end_of(node: Any) -> int:
    """Return where a node ends; without braces or brackets it ends with its last value, before comments."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        node = node.value[-1][1]
    elif _is_block_list(node):
        return _end_of(node.value[-1])
    return int(node.end_mark.index)


def _is_block_list(node: Any) -> bool:
    return isinstance(node, yaml.SequenceNode) and not node.flow_style


def _node_at(node: Any, place: Sequence[str]) -> Any:
    for name in place:
        entries = node.value if isinstance(node, yaml.MappingNode) else ()
        node = {key.value: value for key, value in entries}[name]
    return node
