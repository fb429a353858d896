"""Describe problems of a spec as SpecProblems: a pointer to the user's line, a sentence and a hint."""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import quote

from pydantic import ValidationError

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.ids import RULES

AllowedKeys: TypeAlias = Callable[[Sequence[str | int]], Sequence[str]]
"""Function that lists the keys of the mapping at a path of the spec."""

MAX_DEPTH = 16
"""Levels of mappings and lists in a spec."""
MAX_DIGITS = 400
"""Digits of one number."""
Place: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the top of a spec."""
MAX_SHOWN = 60
"""Characters of a value that a message repeats."""


def pointer(*path: str | int) -> str:
    """Return the RFC 6901 pointer of `path` as a URI fragment, for example "#/variants/psiv-on"."""
    parts = (quote(str(part).replace("~", "~0").replace("/", "~1"), safe="!$&'()*+,;=:@~") for part in path)
    return "#" + "".join(f"/{part}" for part in parts)


_SHORT = {"fp32": "float32", "fp16": "float16", "fp64": "float64"}
"""Short forms too unlike their names for a comparison of letters."""
_LEAST = 3
"""Fewest letters that may stand for a whole name."""
_HINTED = 3
"""Most names in one hint."""


def nearest(name: str, allowed: Iterable[str], labels: Mapping[str, str] | None = None) -> str | None:
    """Return "did you mean 'x'?" for the allowed names nearest to `name`, or None.

    `labels` are other words for names. The first of these that matches wins: the name apart from case and signs, a
    short form, names that contain all parts of it, the name with the most similar letters.
    """
    words = {word: one for one in allowed for word in (_plain(one), _plain((labels or {}).get(one, one)))}
    plain = _plain(name)
    names = [words[word] for word in (plain, _SHORT.get(plain, "")) if word in words]
    names = names or _containing(name, words)
    names = names or [words[word] for word in difflib.get_close_matches(plain, words, n=1, cutoff=0.6)]
    offered = [f"'{one}'" for one in dict.fromkeys(names)][:_HINTED]
    return f"did you mean {' or '.join(offered)}?" if offered else None


def _containing(name: str, words: Mapping[str, str]) -> list[str]:
    parts = [_plain(part) for part in re.split(r"[^A-Za-z0-9]+", name)]
    if sum(map(len, parts)) < _LEAST:
        return []
    return [one for word, one in words.items() if all(part in word for part in parts)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def shown(value: object) -> str:
    """Write a value like JSON, shortened and with unprintable characters escaped."""
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
    """Join names with commas; "none" without any."""
    return ", ".join(str(name) for name in names) or "none"


_LONGEST_HINT = 100

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


def from_validation(error: ValidationError, allowed_keys: AllowedKeys) -> list[SpecProblem]:
    """Translate pydantic's errors; `allowed_keys(path)` lists the keys of the mapping at `path`."""
    return [_translate(line, allowed_keys) for line in error.errors(include_url=False) if not _is_echo(line)]


def _is_echo(line: Any) -> bool:
    """Say whether a list counts as short only because of bad entries, which have errors of their own."""
    return bool(line["type"] == "too_short" and len(line["input"]) >= line["ctx"]["min_length"])


def _translate(line: Any, allowed_keys: AllowedKeys) -> SpecProblem:
    path = tuple(part for part in line["loc"] if part != "[key]")
    where = pointer(*path)
    name = str(path[-1]) if path else "spec"
    kind, value, context = line["type"], line["input"], line.get("ctx", {})
    if kind == "extra_forbidden":
        allowed = allowed_keys(path[:-1])
        detail = f"unknown key {shown(name)}; known: {listed(allowed)}"
        return SpecProblem(pointer=where, detail=detail, hint=nearest(name, allowed))
    if kind == "literal_error":
        allowed = re.findall("'([^']+)'", context["expected"])
        detail = f"'{name}' is {shown(value)}; allowed: {listed(allowed)}"
        return SpecProblem(pointer=where, detail=detail, hint=nearest(str(value), allowed))
    if kind == "missing":
        return SpecProblem(pointer=where, detail=f"'{name}' is missing", hint=f"add the key '{name}'")
    detail = _sentence(kind, name, value, context, line["msg"])
    return SpecProblem(pointer=where, detail=detail, hint=context.get("hint") or _of_wanted_type(kind, value))


def _of_wanted_type(kind: str, value: object) -> str | None:
    """Return how to write a value of the wrong type; None if that is not clear."""
    if kind in ("list_type", "tuple_type") and isinstance(value, str) and len(value) <= _LONGEST_HINT:
        return f"write it as a list: {json.dumps(value.split(), ensure_ascii=False)}"
    return f'write it in quotes: "{value}"' if kind == "string_type" and type(value) in (int, float) else None


def _sentence(kind: str, name: str, value: object, context: dict[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        return f"'{name}' must be {_EXPECTED[kind]}, got {shown(value)}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"'{name}' is {shown(value)}; allowed: {words.format(context[key])}"
    if kind in _LENGTHS:
        key, words = _LENGTHS[kind]
        return f"'{name}' {words.format(context[key], **context)}"
    if kind == "string_pattern_mismatch":
        rule = RULES.get(context["pattern"], f"text matching {context['pattern']}")
        return f"'{name}' is {shown(value)}; allowed: {rule}"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"'{name}': {message[0].lower()}{message[1:]}" if kind != "spec" else message


def without_repeats(groups: Iterable[Sequence[SpecProblem]]) -> list[SpecProblem]:
    """Return all problems in order, without duplicates."""
    return list(dict.fromkeys(problem for group in groups for problem in group))


def refusal(detail: str, hint: str | None = None, *, at: Place = ()) -> SpecError:
    """Return the error of one problem."""
    return SpecError([SpecProblem(pointer=pointer(*at), detail=detail, hint=hint)])


def too_deep(at: Place = ()) -> SpecError:
    """Return the error of a spec that is nested too deeply."""
    return refusal(f"the spec is nested too deeply; allowed: {MAX_DEPTH} levels", at=at)


def too_many_digits(*, at: Place = ()) -> SpecError:
    """Return the error of a number that is too long."""
    return refusal(f"the spec holds a number with too many digits; allowed: {MAX_DIGITS}", at=at)


def duplicate_key(key: str, at: Place = ()) -> SpecError:
    """Return the error of a key that a mapping has twice."""
    return refusal(f"key {shown(key)} appears more than once", "keep one of them", at=at)
