"""Draw programs of trouble, and say what an honest service must answer for each of them."""

import random
from typing import Any, NamedTuple

READABLE = ("plain", "exponent", "coloured", "after a bar", "unended", "windows", "reported")
UNREADABLE = (
    *("thousands", "suffix", "underscore", "percent", "hexadecimal", "tensor", "nothing", "none"),
    *("nan", "c nan", "infinity", "two points"),
)
NOISE = ("none", "bar", "binary", "long line", "warnings", "other metrics", "talk")
WELL = ("return", "well by exit", "well by exit without a code")
BADLY = (
    *("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSEGV", "SIGBUS", "SIGQUIT", "SIGUSR1", "kill 0"),
    *("processor time", "abort", "raise", "exit 1", "exit 3", "exit 137", "exit with a text", "exit at once"),
)
CHILDREN = ("none", "zombie", "late", "daemon", "deaf", "stopped", "holds the output", "loud")
FILES = ("none", "closed folder", "strange names", "pipes and links", "deep", "temporary", "segments")
MAY_FAIL = ("loud", "late", "daemon", "deaf", "stopped", "holds the output")
"""Children after which a trial may fail; if it counts, its value must be right."""


class Expected(NamedTuple):
    """What a trial must have given."""

    measured: bool
    """Whether a value may be stored at all."""
    failed: bool
    """Whether the trial may have failed."""


def draw(seed: str, count: int) -> list[dict[str, Any]]:
    """Return `count` troubles; half of them end well, and half have a value that can be read."""
    drawn = random.Random(seed)  # noqa: S311  # no secret
    return [_one(drawn) for _number in range(count)]


def _one(drawn: random.Random) -> dict[str, Any]:
    def rarely(values: tuple[str, ...]) -> str:
        return drawn.choice(values) if drawn.random() < 0.5 else values[0]

    inside = drawn.random() < 0.5
    form = drawn.choice(READABLE if drawn.random() < 0.6 else UNREADABLE)
    return {
        "inside": inside,
        "before": rarely(NOISE),
        "older": drawn.random() < 0.5,
        "between": rarely(NOISE),
        "form": "plain" if form == "reported" and not inside else form,
        "after": rarely(NOISE),
        "children": rarely(CHILDREN),
        "files": rarely(FILES),
        "end": drawn.choice(WELL if drawn.random() < 0.6 else BADLY),
    }


def expected(trouble: dict[str, Any]) -> Expected:
    """Return what a trial with this trouble must have given."""
    counts = trouble["end"] in WELL and trouble["form"] in READABLE
    may_fail = trouble["children"] in MAY_FAIL or trouble["form"] == "unended"  # a number at the very end may be a part
    return Expected(measured=counts, failed=not counts or may_fail)
