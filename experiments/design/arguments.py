"""Arguments of a program: those of one command line, changed by those of another.

A flag is a word that begins with a dash and is no number. The words after it, up to the next flag or pair, are its
values, and `--flag=value` has exactly one. A pair is `name=value`, unless it is the first value of a flag. The words
after `--` are never flags. No program's own parser is asked.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

_END = "--"
_PAIR = re.compile(r"([A-Za-z_+~][\w./+-]*)=.*", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A flag with its values, a pair, or words that belong to neither."""

    flag: str | None
    """Name of the flag or pair."""
    words: tuple[str, ...]
    joined: bool = False
    """Whether it is written with its value in one word."""


def merged_arguments(base: Sequence[str], changes: Sequence[str]) -> tuple[str, ...]:
    """Return `base` with `changes`: a flag or pair of the same name is replaced with its values, the rest is added.

    A repeated one is replaced as a whole: all of `base` by all of `changes`. A flag replaces as many values as it has
    itself, so words that follow them stay.
    """
    parts, rest = _divided(base)
    own_parts, own_rest = _divided(changes)
    new: dict[str | None, list[_Part]] = {}
    for part in own_parts:
        new.setdefault(part.flag, []).append(part)
    words: list[str] = []
    placed = set()
    for part in parts:
        if part.flag is None or part.flag not in new:
            words += part.words
            continue
        if part.flag not in placed:
            words += [word for one in new[part.flag] for word in one.words]
            placed.add(part.flag)
        words += _surplus(part, new[part.flag])
    words += [word for one in own_parts if one.flag not in placed for word in one.words]
    end = (_END,) if _END in (*base, *changes) else ()
    return (*words, *end, *rest, *own_rest)


def flags_of(words: Sequence[str]) -> dict[str, str]:
    """Return the values of each flag or pair as one text, of a repeated one together; other words under no name."""
    parts, rest = _divided(words)
    values: dict[str, list[str]] = {}
    for part in parts:
        own = [part.words[0].partition("=")[2]] if part.joined else part.words[part.flag is not None :]
        values.setdefault(part.flag or "", []).extend(own)
    if rest:
        values.setdefault("", []).extend(rest)
    return {flag: shlex.join(own) for flag, own in values.items()}


def _divided(words: Sequence[str]) -> tuple[list[_Part], Sequence[str]]:
    """Return the parts before `--`, and the words after it."""
    end = words.index(_END) if _END in words else len(words)
    return list(_parts(words[:end])), words[end + 1 :]


def _parts(words: Sequence[str]) -> Iterator[_Part]:
    starts = [place for place, word in enumerate(words) if _is_flag(word) or _is_pair(words, place)]
    first = starts[0] if starts else len(words)
    if first:
        yield _Part(flag=None, words=tuple(words[:first]))
    for start, stop in pairwise([*starts, len(words)]):
        name, joined, _ = words[start].partition("=")
        if not joined:
            yield _Part(flag=name, words=tuple(words[start:stop]))
            continue
        yield _Part(flag=name, words=(words[start],), joined=True)
        if stop > start + 1:
            yield _Part(flag=None, words=tuple(words[start + 1 : stop]))


def _is_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _is_pair(words: Sequence[str], place: int) -> bool:
    """Return whether a word is a pair of its own, and not the first value of a flag."""
    before = words[place - 1] if place else ""
    return _PAIR.fullmatch(words[place]) is not None and not (_is_flag(before) and "=" not in before)


def _surplus(part: _Part, new: Sequence[_Part]) -> tuple[str, ...]:
    """Return words after a replaced flag that are none of its values."""
    if part.joined:
        return ()
    return part.words[2:] if any(one.joined for one in new) else part.words[max(len(one.words) for one in new) :]
