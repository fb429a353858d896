"""Turn whatever is wrong with a spec into SpecProblems: a pointer to the user's line, a sentence and a hint."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

from pydantic import ValidationError

from experiments.errors import SpecProblem

KnownKeys: TypeAlias = Callable[[Sequence[str | int]], Sequence[str]]
"""Lists the keys that the mapping at a path of the spec may have."""

MAX_SHOWN = 60
"""Characters of a given value that a message repeats."""


def pointer(*path: str | int) -> str:
    """Return the RFC 6901 pointer of `path` as a URI fragment, for example "#/variants/psiv-on"."""
    parts = (quote(str(part).replace("~", "~0").replace("/", "~1"), safe="!$&'()*+,;=:@~") for part in path)
    return "#" + "".join(f"/{part}" for part in parts)


_SHORT = {"fp32": "float32", "fp16": "float16", "fp64": "float64"}
"""Short forms that no likeness of letters leads from."""
_LEAST = 3
"""Letters of a part that may stand for the whole name."""
_HINTED = 3
"""Names that one hint offers."""


def nearest(name: str, known: Iterable[str], labels: Mapping[str, str] | None = None) -> str | None:
    """Return "did you mean 'x'?" for the known names that are meant, or None; `labels` are other words for names.

    In this order: the same but for case and signs, a short form, those that hold every part of it, the likest one.
    """
    words = {word: one for one in known for word in (_plain(one), _plain((labels or {}).get(one, one)))}
    given = _plain(name)
    found = [words[word] for word in (given, _SHORT.get(given, "")) if word in words]
    found = found or _holding(name, words)
    found = found or [words[word] for word in difflib.get_close_matches(given, words, n=1, cutoff=0.6)]
    offered = [f"'{one}'" for one in dict.fromkeys(found)][:_HINTED]
    return f"did you mean {' or '.join(offered)}?" if offered else None


def _holding(name: str, words: Mapping[str, str]) -> list[str]:
    parts = [_plain(part) for part in re.split(r"[^A-Za-z0-9]+", name)]
    if sum(map(len, parts)) < _LEAST:
        return []
    return [one for word, one in words.items() if all(part in word for part in parts)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def shown(value: object) -> str:
    """Write a given value as JSON would, shortened and with unprintable characters escaped."""
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def listed(names: Iterable[object]) -> str:
    """Write the allowed names, or "none"."""
    return ", ".join(str(name) for name in names) or "none"


_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
}

_BOUNDS = {
    "greater_than": ("gt", "greater than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
}

_LENGTHS = {
    "too_long": ("max_length", "has {actual_length} entries; allowed: at most {}"),
    "too_short": ("min_length", "has {actual_length} entries; allowed: at least {}"),
    "string_too_long": ("max_length", "is longer than the {} characters allowed"),
    "string_too_short": ("min_length", "is empty; allowed: at least {} characters"),
}


def from_validation(error: ValidationError, known_keys: KnownKeys) -> list[SpecProblem]:
    """Translate pydantic's findings; `known_keys(path)` lists the keys that the mapping at `path` may have."""
    return [_translate(found, known_keys) for found in error.errors(include_url=False) if not _is_echo(found)]


def _is_echo(found: Any) -> bool:
    """Tell whether pydantic counts a list as short only because its entries are bad, which is reported anyway."""
    return bool(found["type"] == "too_short" and len(found["input"]) >= found["ctx"]["min_length"])


def _translate(found: Any, known_keys: KnownKeys) -> SpecProblem:
    path = tuple(part for part in found["loc"] if part != "[key]")
    where = pointer(*path)
    name = str(path[-1]) if path else "spec"
    kind, given, context = found["type"], found["input"], found.get("ctx", {})
    if kind == "extra_forbidden":
        known = known_keys(path[:-1])
        detail = f"unknown key {shown(name)}; known: {listed(known)}"
        return SpecProblem(pointer=where, detail=detail, hint=nearest(name, known))
    if kind == "literal_error":
        known = re.findall("'([^']+)'", context["expected"])
        detail = f"'{name}' is {shown(given)}; allowed: {listed(known)}"
        return SpecProblem(pointer=where, detail=detail, hint=nearest(str(given), known))
    if kind == "missing":
        return SpecProblem(pointer=where, detail=f"'{name}' is missing", hint=f"add the key '{name}'")
    return SpecProblem(
        pointer=where, detail=_sentence(kind, name, given, context, found["msg"]), hint=context.get("hint")
    )


def _sentence(kind: str, name: str, given: object, context: dict[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        return f"'{name}' must be {_EXPECTED[kind]}, got {shown(given)}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"'{name}' is {shown(given)}; allowed: {words.format(context[key])}"
    if kind in _LENGTHS:
        key, words = _LENGTHS[kind]
        return f"'{name}' {words.format(context[key], **context)}"
    if kind == "string_pattern_mismatch":
        return f"'{name}' is {shown(given)}; allowed: text matching {context['pattern']}"
    return f"'{name}': {message[0].lower()}{message[1:]}" if kind != "spec" else message


def without_repeats(groups: Iterable[Sequence[SpecProblem]]) -> list[SpecProblem]:
    """Return all problems once, in the order in which they were found."""
    return list(dict.fromkeys(problem for group in groups for problem in group))
