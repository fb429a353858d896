"""Numbers with their units, names of metrics, and states, as people read them."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from experiments.outcomes import Decision, VerdictWord

MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"
NOTHING = "\N{EN DASH}"
"""Stands where there is no value."""

METRICS: dict[str, str] = {
    "tokens_per_s": "throughput",
    "step_s": "step time",
    "model_tflops_per_s": "model TFLOP/s",
    "loss_step1": "loss of step 1",
    "loss_final": "final training loss",
    "loss_val": "validation loss",
    "peak_reserved_gib": "peak reserved memory",
    "peak_allocated_gib": "peak allocated memory",
    "compile_s": "compile time",
}


class Badge(NamedTuple):
    """How a verdict word looks: a sign beside the word, so that colour is never alone."""

    sign: str
    tone: str
    """CSS class: good, bad, neutral, open or broken."""


BADGES: dict[VerdictWord, Badge] = {
    VerdictWord.BETTER: Badge("\N{BLACK UP-POINTING TRIANGLE}", "good"),
    VerdictWord.SAME: Badge("\N{IDENTICAL TO}", "neutral"),
    VerdictWord.WORSE: Badge("\N{BLACK DOWN-POINTING TRIANGLE}", "bad"),
    VerdictWord.INCONCLUSIVE: Badge("?", "open"),
    VerdictWord.INVALID: Badge("!", "broken"),
    VerdictWord.REFUSED: Badge("\N{CIRCLED DIVISION SLASH}", "broken"),
    VerdictWord.OOM: Badge("\N{BLACK SQUARE}", "bad"),
    VerdictWord.FAILED: Badge("\N{MULTIPLICATION SIGN}", "broken"),
}

DECISIONS: dict[Decision, str] = {
    Decision.ADOPT: "adopt",
    Decision.REJECT: "do not adopt",
    Decision.SAME: "no difference",
    Decision.INCONCLUSIVE: "not decided",
    Decision.INVALID: "no valid measurement",
}


class PrimaryRule(NamedTuple):
    """The part of the rule that pictures show."""

    metric: str = "tokens_per_s"
    margin_pct: float = 0.0
    adopt_if_pct: float = 0.0


def primary_rule(rule: Mapping[str, Any]) -> PrimaryRule:
    """Read metric, margin and adoption bound out of a verdict's rule."""
    primary = rule["primary"]
    return PrimaryRule(metric=primary["metric"], margin_pct=primary["margin_pct"], adopt_if_pct=primary["adopt_if_pct"])


def metric(name: str) -> str:
    """Name a metric for people."""
    return METRICS.get(name, name)


def signed(value: float, digits: int = 2) -> str:
    """Format with a sign and at most `digits` decimals; zero has no sign."""
    if not math.isfinite(value):
        return str(value)
    text = f"{abs(value):.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if float(text) == 0 else f"{'+' if value > 0 else MINUS}{text}"


def interval(low_pct: float, high_pct: float) -> str:
    """Format an interval in percent."""
    return f"{percent(low_pct).split(SPACE)[0]} to {percent(high_pct)}"


def percent(value: float) -> str:
    """Format a change in percent with a sign and two decimals."""
    if not math.isfinite(value):
        return str(value)
    sign = "+" if round(value, 2) > 0 else MINUS if round(value, 2) < 0 else ""
    return f"{sign}{abs(value):.2f}{SPACE}%"


def plain_percent(value: float) -> str:
    """Format a percentage without a sign."""
    return f"{value:.3g}{SPACE}%"


def gib(num_bytes: float | None) -> str:
    """Format bytes as GiB, or MiB below one GiB."""
    if num_bytes is None:
        return NOTHING
    return f"{num_bytes / 2**30:.2f}{SPACE}GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f}{SPACE}MiB"


def seconds(value: float | None) -> str:
    """Format a duration in the unit that fits it."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    if value < 1:
        return f"{1000 * value:.1f}{SPACE}ms"
    return f"{value:.2f}{SPACE}s" if value < 120 else f"{value / 60:.1f}{SPACE}min"


def number(value: float | None, digits: int = 4) -> str:
    """Format with `digits` significant digits, thousands grouped."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def fixed(value: float | None, digits: int = 4) -> str:
    """Format with exactly `digits` decimals."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def moment(rfc3339: str) -> str:
    """Format an RFC 3339 time in UTC to the second; anything else is shown as it is."""
    try:
        time = datetime.fromisoformat(rfc3339)
    except ValueError:
        return rfc3339
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def counted(count: int, noun: str) -> str:
    """Join a count and its noun in the right number."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(names: list[str]) -> str:
    """Join names as a sentence does: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
