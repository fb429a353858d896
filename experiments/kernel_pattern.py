"""Patterns of kernel names: regular expressions whose search takes time in proportion to the name.

Python's own search backtracks, and a pattern such as (a+)+$ then takes longer than any trial. Here a pattern becomes an
automaton (Glushkov's) whose states are the bits of one number, and a name is read once. The language is a part of
Python's: characters, classes, groups, `|`, `^`, `$` and counts. A search only says whether something matches, so that
greedy and lazy counts mean the same.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

MAX_PATTERN = 120
"""Longest pattern, in characters."""
MAX_POSITIONS = 120
"""Most characters of a pattern after its counts are written out."""
MAX_NAME = 300
"""Characters of a name that are searched."""
_MAX_CACHE = 4096
_BEGIN, _END = "\x02", "\x03"
"""Stand for the two ends of a name, so that an anchor is a character like others."""
_COUNT = re.compile(r"\{(\d{1,3})(?:(,)(\d{1,3})?)?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_ESCAPE = re.compile(r"\\(?:[dDsSwW]|[^a-zA-Z0-9])")
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class PatternError(ValueError):
    """The pattern is no regular expression that this module can search."""


class _Part(NamedTuple):
    """A part of the automaton: where it may begin and end, as bits of positions."""

    nullable: bool
    first: int
    last: int


_EMPTY = _Part(nullable=True, first=0, last=0)
_Maker: TypeAlias = Callable[[], _Part]
"""Function that adds one more copy of a part to the automaton."""


class KernelPattern:
    """A compiled pattern. Raises PatternError for anything but a pattern of this language."""

    def __init__(self, text: str) -> None:
        if not 1 <= len(text) <= MAX_PATTERN:
            raise PatternError(f"has {len(text)} characters; allowed: 1 to {MAX_PATTERN}")
        self.text = text
        self._at = 0
        self._tests: list[Callable[[str], bool]] = []
        self._follow: list[int] = []
        self._anchors = {_BEGIN: 0, _END: 0}
        """Positions of anchors: no way through the automaton needs more of them in a row."""
        whole = self._alternatives()()
        if self._at < len(text):
            raise PatternError(f"has an unmatched ')' at position {self._at + 1}")
        if whole.nullable:
            raise PatternError("matches the empty text, and so every name")
        self._whole = whole
        self._masks: dict[str, int] = {}
        self._next: dict[int, int] = {}

    def search(self, name: str) -> bool:
        """Return whether the pattern matches anywhere in the first characters of a name."""
        state, first, last = 0, self._whole.first, self._whole.last
        for letter in _BEGIN * self._anchors[_BEGIN] + name[:MAX_NAME] + _END * self._anchors[_END]:
            state = (self._after(state) | first) & self._mask(letter)
            if state & last:
                return True
        return False

    def _mask(self, letter: str) -> int:
        """Return the positions that a letter may stand at."""
        if letter not in self._masks:
            _bound(self._masks)
            self._masks[letter] = sum(1 << place for place, fits in enumerate(self._tests) if fits(letter))
        return self._masks[letter]

    def _after(self, state: int) -> int:
        """Return the positions that may follow those in `state`."""
        if state not in self._next:
            _bound(self._next)
            self._next[state] = reduce(lambda found, place: found | self._follow[place], _bits(state), 0)
        return self._next[state]

    def _alternatives(self) -> _Maker:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return lambda: reduce(_either, (make() for make in branches))

    def _sequence(self) -> _Maker:
        makers: list[_Maker] = []
        while self._at < len(self.text) and self.text[self._at] not in "|)":
            makers.append(self._counted(self._item()))
        return lambda: self._joined(makers)

    def _joined(self, makers: Iterable[_Maker]) -> _Part:
        return reduce(self._then, (make() for make in makers), _EMPTY)

    def _then(self, one: _Part, other: _Part) -> _Part:
        self._link(one.last, other.first)
        return _Part(
            nullable=one.nullable and other.nullable,
            first=one.first | (other.first if one.nullable else 0),
            last=other.last | (one.last if other.nullable else 0),
        )

    def _link(self, last: int, first: int) -> None:
        for place in _bits(last):
            self._follow[place] |= first

    def _counted(self, make: _Maker) -> _Maker:
        count = self._count()
        if count is None:
            return make
        low, high = count
        if self._count() is not None:
            raise PatternError(f"repeats a count at position {self._at}")

        def again() -> _Part:
            part = make()
            self._link(part.last, part.first)
            return part

        if high is None:
            return lambda: self._joined([*[make] * (low - 1), again]) if low else _optional(again())
        return lambda: self._joined([*[make] * low, *[lambda: _optional(make())] * (high - low)])

    def _count(self) -> tuple[int, int | None] | None:
        """Read a count, and the `?` of a lazy one; None without one."""
        braces = _COUNT.match(self.text, self._at)
        low: int
        high: int | None
        if braces is not None:
            self._at = braces.end()
            low = int(braces[1])
            high = low if braces[2] is None else int(braces[3]) if braces[3] else None
        elif self._at < len(self.text) and self.text[self._at] in _COUNTS:
            low, high = _COUNTS[self.text[self._at]]
            self._at += 1
        else:
            return None
        if high is not None and high < low:
            raise PatternError(f"has a count from {low} to {high}")
        if self._take("+"):
            raise PatternError(f"has a possessive count at position {self._at}")
        self._take("?")
        return low, high

    def _item(self) -> _Maker:
        """Read one character, class, anchor or group."""
        letter = self.text[self._at]
        if letter == "(":
            return self._group()
        if letter in _COUNTS or _COUNT.match(self.text, self._at):
            raise PatternError(f"repeats nothing at position {self._at + 1}")
        if letter in "^$":
            return self._anchor(_BEGIN if letter == "^" else _END)
        kind = {"[": _CLASS, "\\": _ESCAPE}.get(letter)
        found = kind.match(self.text, self._at) if kind else None
        if kind is not None and found is None:
            what = "an unclosed '['" if letter == "[" else f"an unknown escape '{self.text[self._at : self._at + 2]}'"
            raise PatternError(f"has {what} at position {self._at + 1}")
        source = found[0] if found else letter if letter == "." else re.escape(letter)
        self._at += len(found[0]) if found else 1
        try:
            one = re.compile(source, re.ASCII | re.DOTALL)
        except (re.error, FutureWarning) as error:
            raise PatternError(f"has an illegal class {source}: {error}") from error
        return self._atom(lambda letter: letter not in (_BEGIN, _END) and one.fullmatch(letter) is not None)

    def _anchor(self, end: str) -> _Maker:
        self._at += 1
        if self._count() is not None:
            raise PatternError(f"repeats an anchor at position {self._at}")
        atom = self._atom(lambda letter: letter == end)

        def make() -> _Part:
            self._anchors[end] += 1
            return atom()

        return make

    def _group(self) -> _Maker:
        begin = self._at
        self._at += 1
        if self._take("?") and not self._take(":"):
            raise PatternError(f"has a special group at position {begin + 1}; allowed: (...) and (?:...)")
        made = self._alternatives()
        if not self._take(")"):
            raise PatternError(f"has an unclosed '(' at position {begin + 1}")
        return made

    def _atom(self, test: Callable[[str], bool]) -> _Maker:
        def make() -> _Part:
            place = len(self._tests)
            if place == MAX_POSITIONS:
                raise PatternError(f"has more than {MAX_POSITIONS} characters when its counts are written out")
            self._tests.append(test)
            self._follow.append(0)
            return _Part(nullable=False, first=1 << place, last=1 << place)

        return make

    def _take(self, letter: str) -> bool:
        taken = self.text.startswith(letter, self._at)
        self._at += taken
        return taken


def _either(one: _Part, other: _Part) -> _Part:
    return _Part(one.nullable or other.nullable, one.first | other.first, one.last | other.last)


def _optional(part: _Part) -> _Part:
    return part._replace(nullable=True)


def _bits(state: int) -> Iterable[int]:
    while state:
        lowest = state & -state
        yield lowest.bit_length() - 1
        state ^= lowest


def _bound(cache: dict[Any, int]) -> None:
    if len(cache) >= _MAX_CACHE:
        cache.clear()


def nearest_names(pattern: str, names: Sequence[str], most: int = 3) -> list[str]:
    """Return the names that share most runs of three letters with a pattern; earlier names first among equals."""
    wanted = _runs(pattern)
    return sorted(names, key=lambda name: -len(wanted & _runs(name[:MAX_NAME])))[:most]


def _runs(text: str) -> set[str]:
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower())
    return {plain[at : at + 3] for at in range(len(plain) - 2)}
