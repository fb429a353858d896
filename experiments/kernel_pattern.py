"""Patterns of kernel names: regular expressions of RE2, whose search takes time in proportion to the name.

Python's own search backtracks, and a pattern such as (a+)+$ then takes longer than any trial.
"""

import re
from collections.abc import Sequence

import re2

MAX_PATTERN = 120
"""Longest pattern, in characters."""
MAX_NAME = 300
"""Characters of a name that are searched."""


class PatternError(ValueError):
    """The pattern is no regular expression of RE2, or matches every name."""


class KernelPattern:
    """A compiled pattern. Raises PatternError for anything but a pattern of RE2 that some name does not match."""

    def __init__(self, text: str) -> None:
        if not 1 <= len(text) <= MAX_PATTERN:
            raise PatternError(f"has {len(text)} characters; allowed: 1 to {MAX_PATTERN}")
        options = re2.Options()
        options.log_errors = False
        try:
            self._compiled = re2.compile(_bytes(text), options)
        except re2.error as error:
            raise PatternError(f"is no regular expression of RE2: {_sentence(error)}") from error
        if self.search(""):
            raise PatternError("matches the empty text, and so every name")

    def search(self, name: str) -> bool:
        """Return whether the pattern matches anywhere in the first characters of a name."""
        return self._compiled.search(_bytes(name[:MAX_NAME])) is not None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # halves of characters, which a receipt from elsewhere may hold


def _sentence(error: re2.error) -> str:
    reason = error.args[0]
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)


def nearest_names(pattern: str, names: Sequence[str], most: int = 3) -> list[str]:
    """Return the names that share most runs of three letters with a pattern; earlier names first among equals."""
    runs = _runs(pattern)
    return sorted(names, key=lambda name: -len(runs & _runs(name[:MAX_NAME])))[:most]


def _runs(text: str) -> set[str]:
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower())
    return {plain[at : at + 3] for at in range(len(plain) - 2)}
