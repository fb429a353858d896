"""How two graphs differ, in a sentence: for a step that compiled again although its shapes did not change.

Instructions are compared without their numbers, which shift when one is added anywhere before them.
"""

import re
from collections import Counter
from collections.abc import Iterable

SHOWN = 3
"""Instructions of each kind that the sentence quotes."""
LINE_LIMIT = 160  # characters

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ")
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_NUMBERED = re.compile(r"(%?[A-Za-z_][\w-]*?)(?:\.\d+)+")


def describe_change(before: str, after: str) -> str:
    """Return how the module with text `after` differs from that with text `before`."""
    old, new = _instructions(before), _instructions(after)
    gone, come = old - new, new - old
    if not gone and not come:
        return "the same instructions, joined in another way"
    counts = f"{come.total()} of its {new.total()} instructions are new, {gone.total()} of {old.total()} are gone"
    return "; ".join([counts, *_quoted("new", come), *_quoted("gone", gone)])


def _quoted(kind: str, instructions: "Counter[str]") -> Iterable[str]:
    return (f"{kind}: {line[:LINE_LIMIT]}" for line in sorted(instructions, key=_constants_first)[:SHOWN])


def _constants_first(line: str) -> tuple[bool, str]:
    """Sort what holds numbers of the program's own before what merely follows from it."""
    return " constant(" not in line and "slice={" not in line, line


def _instructions(text: str) -> "Counter[str]":
    lines = (line for line in text.splitlines() if _INSTRUCTION.match(line))
    return Counter(_NUMBERED.sub(r"\1", _METADATA.sub("", line)).strip() for line in lines)
