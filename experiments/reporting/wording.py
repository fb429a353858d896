"""How numbers with units, times, metrics and lists are written for people, everywhere alike: thousands are grouped."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from experiments.analysis.noise.ledger import needed
from experiments.analysis.verdicts import ArmSummary, NodeMeans, Verdict
from experiments.design.arms import Arm
from experiments.design.gate import show
from experiments.design.metrics import METRICS
from experiments.design.power import ALPHA
from experiments.records.calibration import Ledger

if TYPE_CHECKING:
    from experiments.records.receipts import Receipt

MOST_NODES = 3
"""Nodes whose rates are told one by one."""


def rate(arm: ArmSummary) -> str | None:
    """Write an arm's throughput: by node where it ran on several, or marked as a mean over many; None without one."""
    if arm.tokens_per_s is None:
        return None
    if arm.by_node is None:
        return f"{number(arm.tokens_per_s, 4)} tokens/s"
    if len(arm.by_node) > MOST_NODES:
        return f"{number(arm.tokens_per_s, 4)} tokens/s (mean over {len(arm.by_node)} nodes)"
    each = [f"{number(found.tokens_per_s, 4)} on {node}" for node, found in arm.by_node.items()]
    return f"{listed(each)} tokens/s"


def blocks_of(by_node: Mapping[str, NodeMeans]) -> str:
    """Say how many blocks ran where, for example "2 on cpu-1 and 1 on cpu-2"."""
    return listed([f"{found.blocks:,} on {node}" for node, found in by_node.items()])


def of_baseline(verdict: Verdict) -> Mapping[str, NodeMeans] | None:
    """Return the nodes that the blocks ran on; None where it was one."""
    return verdict.arms[verdict.baseline].by_node


def caveat(verdict: Verdict) -> str | None:
    """Say that absolute rates are means over several nodes; None where one node ran all."""
    found = of_baseline(verdict)
    if found is None:
        return None
    return (
        f"Blocks ran on {len(found)} nodes ({blocks_of(found)}). An effect is taken within blocks, each on one node; "
        "a mean rate or time is over nodes of unequal speed."
    )


def _rates_by_node(by_node: Mapping[str, NodeMeans]) -> str:
    """Write blocks and throughput of every node, for example "cpu-1: 2 blocks, 701 tokens/s; cpu-2: 1 block"."""
    return "; ".join(f"{node}: {counted(found.blocks, 'block')}{_at(found)}" for node, found in by_node.items())


def _at(found: NodeMeans) -> str:
    return "" if found.tokens_per_s is None else f", {number(found.tokens_per_s, 4)} tokens/s"


def of_arm(summary: ArmSummary, receipts: Sequence["Receipt"]) -> str:
    """Say on which nodes an arm ran; where on several, with blocks and throughput of each."""
    if summary.by_node is not None:
        return _rates_by_node(summary.by_node)
    return ", ".join(sorted({receipt.environment.node_name for receipt in receipts}))


def false_words(ledger: Ledger) -> str:
    """Say the service's own rate of false words, and what it can support."""
    if ledger.ablations == 0:
        return "No A/A ablation has been judged yet, so the rate of false words of this service is not known."
    found = f"{ledger.false_words} false {'word' if ledger.false_words == 1 else 'words'} in "
    judged = counted(ledger.ablations, "A/A ablation")
    bound = plain_percent(100 * ledger.upper_bound)
    support = (
        ""
        if ledger.upper_bound <= ALPHA
        else f" It takes {needed(ledger.false_words)} to support at most 5{SPACE}%."
    )
    sure = f"with 95{SPACE}% confidence (Clopper and Pearson)"
    return f"{found}{judged}: at most {bound} false words, {sure}.{support}"


def changed_gates(arm: Arm, baseline: Arm) -> str:
    """Return the gates in which `arm` differs, for example "chunk_size=32, psiv_cache=true"; empty for a repeat."""
    changed = sorted(name for name, value in arm.gates.items() if value != baseline.gates[name])
    return ", ".join(f"{name}={show(arm.gates[name])}" for name in changed)


def gate_values(name: str, arms: tuple[Arm, ...], longest: int) -> str:
    """Return one gate over all arms: its value, then who differs, for example "16; chunk-32: 32"."""
    first, *others = arms
    differing = [f"{arm.name}: {show(arm.gates[name])}" for arm in others if arm.gates[name] != first.gates[name]]
    return shorten("; ".join([show(first.gates[name]), *differing]), longest)


MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"
NOTHING = "\N{EN DASH}"
"""Stands where there is no value."""
_HYPHEN_MINUS = re.compile(r"(?<![\w-])-(?=\d)")
_UNITS = ((172_800, 86_400, "days"), (5_400, 3600, "h"), (100, 60, "min"))
"""From so many seconds on: seconds of the unit, its name."""


def metric(name: str) -> str:
    """Name a metric for people."""
    return METRICS[name].label


def signed(value: float, digits: int = 2) -> str:
    """Format with a sign and at most `digits` decimals; zero has no sign."""
    if not math.isfinite(value):
        return str(value)
    text = f"{abs(value):,.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text if text == "0" else f"{'+' if value > 0 else MINUS}{text}"


def interval(low_pct: float, high_pct: float) -> str:
    """Format an interval in percent."""
    return f"{percent(low_pct).split(SPACE)[0]} to {percent(high_pct)}"


def percent(value: float) -> str:
    """Format a change in percent with a sign and two decimals."""
    if not math.isfinite(value):
        return str(value)
    sign = "+" if round(value, 2) > 0 else MINUS if round(value, 2) < 0 else ""
    return f"{sign}{size_percent(abs(value))}"


def size_percent(value: float) -> str:
    """Format a size in percent, which has no sign, with two decimals."""
    return f"{value:,.2f}{SPACE}%"


def plain_percent(value: float) -> str:
    """Format a percentage without a sign and with the digits that it needs."""
    return f"{number(value, 3)}{SPACE}%"


def confidence(alpha: float) -> str:
    """Format the confidence of an interval whose two-sided level is `alpha`."""
    return plain_percent(100 * (1 - alpha))


def gib(num_bytes: float | None) -> str:
    """Format bytes as GiB, or MiB below one GiB."""
    if num_bytes is None:
        return NOTHING
    return f"{num_bytes / 2**30:,.2f}{SPACE}GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f}{SPACE}MiB"


def quantities(metric: str, values: Sequence[float]) -> list[str]:
    """Format values of a metric with their unit, in as many digits as it takes to tell different ones apart."""
    unit = METRICS[metric].unit
    if unit == "GiB":
        shown, exactly = [gib(value * 2**30) for value in values], [f"{value * 2**30:,.0f}" for value in values]
        unit = "bytes"
    else:
        shown, exactly = [f"{number(value, 6)}{SPACE}{unit}" for value in values], [repr(value) for value in values]
    return shown if len(set(shown)) == len(set(values)) else [f"{value}{SPACE}{unit}" for value in exactly]


def bytes_change(num_bytes: int) -> str:
    """Format a change of bytes, with a sign, as GiB, or MiB below one GiB."""
    if abs(num_bytes) >= 2**30:
        return f"{signed(num_bytes / 2**30)}{SPACE}GiB"
    return f"{signed(num_bytes / 2**20, 1)}{SPACE}MiB"


def seconds(value: float | None) -> str:
    """Format a duration in the unit that fits it."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    if value < 1:
        return f"{1000 * value:.1f}{SPACE}ms"
    return f"{value:.2f}{SPACE}s" if value < 120 else f"{value / 60:,.1f}{SPACE}min"


def duration(seconds: float) -> str:
    """Format seconds in the largest unit of which there are some, for example "12 min"."""
    for least, unit_s, name in _UNITS:
        if seconds >= least:
            return f"{seconds / unit_s:,.0f}{SPACE}{name}"
    return f"{max(0.0, seconds):.0f}{SPACE}s"


def number(value: float | None, digits: int = 4) -> str:
    """Format with `digits` significant digits, thousands grouped."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:,.{digits}g}"


def fixed(value: float | None, digits: int = 4) -> str:
    """Format with exactly `digits` decimals."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def moment(rfc3339: str) -> str:
    """Format an RFC 3339 time in UTC to the second; anything else is shown as it is."""
    try:
        time = datetime.fromisoformat(rfc3339)
    except ValueError:
        return rfc3339
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def share(part: int, whole: int) -> str:
    """Say how many of how many."""
    return f"{part:,} of {whole:,}"


def counted(count: int, noun: str) -> str:
    """Join a count and its noun in the right number."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def left_to_the_table(count: int) -> str:
    """Say of how many variants a picture shows nothing."""
    return f"{counted(count, 'more variant')} {'is' if count == 1 else 'are'} in the table only."


def with_minus(text: str) -> str:
    """Write the minus signs of a text from the analysis as all others are; hyphens stay."""
    return _HYPHEN_MINUS.sub(MINUS, text)


def shorten(text: str, longest: int) -> str:
    """Cut `text` to `longest` characters, with an ellipsis where something is missing."""
    return text if len(text) <= longest else text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def listed(names: list[str]) -> str:
    """Join names as a sentence does: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
