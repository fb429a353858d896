"""Numbers with units, times, metrics and lists as text for people; thousands are grouped everywhere."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ablate.experiments.design.gate import show
from ablate.experiments.design.metrics import DECLARED_UNIT, METRICS
from ablate.experiments.design.power import ALPHA

if TYPE_CHECKING:
    from ablate.experiments.analysis.verdicts import ArmSummary, NodeMeans, Verdict
    from ablate.experiments.design.arms import Arm
    from ablate.experiments.records.calibration import Calibration, Ledger
    from ablate.experiments.records.receipts import Receipt

MOST_NODES = 3
"""Up to so many nodes, each rate is listed."""
LONGEST_BLOCK_LIST = 60
"""Characters of a list of blocks."""


def drift(calibration: "Calibration") -> str:
    """Return the drift in the time that its A/A blocks took, an hour at most; empty without noise.

    Minutes do not tell what an hour would bring.
    """
    if not calibration.drift_pct_per_hour:
        return ""
    spans: dict[str, list[datetime]] = {}
    for block in calibration.samples:
        spans.setdefault(block.ablation, []).append(datetime.fromisoformat(block.started_at))
    longest_s = max((max(times) - min(times)).total_seconds() for times in spans.values()) if spans else 0.0
    hours = min(longest_s / 3600, 1.0) or 1.0
    return f"{percent(100 * math.expm1(hours * calibration.drift_pct_per_hour / 100))} in {duration(3600 * hours)}"


def rate(arm: "ArmSummary") -> str | None:
    """Return an arm's throughput: per node if it ran on several, as a mean over many; None without tokens."""
    if not arm.tokens_per_s:
        return None
    if arm.by_node is None:
        return f"{number(arm.tokens_per_s, 4)} tokens/s"
    if len(arm.by_node) > MOST_NODES:
        return f"{number(arm.tokens_per_s, 4)} tokens/s (mean over {len(arm.by_node)} nodes)"
    each = [f"{number(means.tokens_per_s, 4)} on {node}" for node, means in arm.by_node.items()]
    return f"{listed(each)} tokens/s"


def blocks_of(by_node: "Mapping[str, NodeMeans]") -> str:
    """Return the number of blocks per node, for example "2 on cpu-1 and 1 on cpu-2"."""
    return listed([f"{means.blocks:,} on {node}" for node, means in by_node.items()])


def of_baseline(verdict: "Verdict") -> "Mapping[str, NodeMeans] | None":
    """Return the nodes that the blocks ran on; None if it was one node."""
    return verdict.arms[verdict.baseline].by_node


def caveat(verdict: "Verdict") -> str | None:
    """Warn that absolute rates are means over several nodes; None if one node ran all blocks."""
    nodes = of_baseline(verdict)
    if nodes is None:
        return None
    return (
        f"Blocks ran on {len(nodes)} nodes ({blocks_of(nodes)}). Effects are computed within blocks, each on one node. "
        "Mean rates and times are over nodes of unequal speed."
    )


def of_arm(summary: "ArmSummary", receipts: Sequence["Receipt"]) -> str:
    """Return the nodes that an arm ran on, for example "cpu-1: 2 blocks, 701 tokens/s; cpu-2: 1 block"."""
    if summary.by_node is None:
        return ", ".join(sorted({receipt.environment.node_name for receipt in receipts}))
    return "; ".join(f"{node}: {counted(means.blocks, 'block')}{_at(means)}" for node, means in summary.by_node.items())


def _at(means: "NodeMeans") -> str:
    return "" if not means.tokens_per_s else f", {number(means.tokens_per_s, 4)} tokens/s"


def false_verdicts(ledger: "Ledger") -> str:
    """Return the service's own rate of false verdicts, and how many ablations would support 5 %."""
    if ledger.ablations == 0:
        return "No A/A ablation has been judged yet, so the rate of false verdicts of this service is unknown."
    counts = f"{counted(ledger.false_words, 'false verdict')} in {counted(ledger.ablations, 'A/A ablation')}"
    bound = f"so the rate of false verdicts is at most {plain_percent(100 * ledger.upper_bound)}"
    text = f"{counts}, {bound} (95{SPACE}% confidence, Clopper and Pearson)."
    if ledger.upper_bound <= ALPHA:
        return text
    from ablate.experiments.analysis.noise.admission import needed  # imports scipy, which most commands do not need

    return f"{text} It takes {counted(needed(ledger.false_words), 'A/A ablation')} to support 5{SPACE}%."


def gate_values(name: str, arms: tuple["Arm", ...], longest: int) -> str:
    """Return one gate over all arms: its value, then the arms that differ, for example "16; chunk-32: 32"."""
    first, *others = arms
    differing = [f"{arm.name}: {show(arm.gates[name])}" for arm in others if arm.gates[name] != first.gates[name]]
    return shorten("; ".join([show(first.gates[name]), *differing]), longest)


MINUS = "\N{MINUS SIGN}"
SPACE = "\N{NO-BREAK SPACE}"
NOTHING = "\N{EN DASH}"
"""Placeholder for a missing value."""
_HYPHEN_MINUS = re.compile(r"(?<![\w-])-(?=\d)")
_FAILURES = {
    "user_error": "error of the program",
    "infra_node": "fault of the node",
    "infra_control": "fault of the service",
}
_UNITS = ((172_800, 86_400, "days"), (5_400, 3600, "h"), (100, 60, "min"))
"""(least seconds, seconds per unit, name of the unit), largest unit first."""


def failure(name: str) -> str:
    """Return a failure class or an outcome in words."""
    return _FAILURES.get(name, name.replace("_", " "))


def metric(name: str) -> str:
    """Return the label of a metric; a declared one has its name."""
    return METRICS[name].label if name in METRICS else name


def unit(name: str) -> str:
    """Return the unit of a metric."""
    return METRICS[name].unit if name in METRICS else DECLARED_UNIT


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
    """Format a percentage without a sign, with three significant digits."""
    return f"{number(value, 3)}{SPACE}%"


def confidence(alpha: float) -> str:
    """Format the confidence of an interval with the two-sided level `alpha`."""
    return plain_percent(100 * (1 - alpha))


def gib(num_bytes: float | None) -> str:
    """Format bytes as GiB, or MiB below one GiB."""
    if num_bytes is None:
        return NOTHING
    return f"{num_bytes / 2**30:,.2f}{SPACE}GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f}{SPACE}MiB"


def quantities(metric: str, values: Sequence[float]) -> list[str]:
    """Format values of a metric with their unit, with enough digits to tell different values apart."""
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
    """Format a duration as µs, ms, s or min."""
    if value is None or not math.isfinite(value):
        return NOTHING if value is None else str(value)
    if 0 < value < 1e-3:
        return f"{1e6 * value:.1f}{SPACE}µs"
    if value < 1:
        return f"{1000 * value:.1f}{SPACE}ms"
    return f"{value:.2f}{SPACE}s" if value < 120 else f"{value / 60:,.1f}{SPACE}min"


def duration(seconds: float) -> str:
    """Format seconds in their largest whole unit, for example "12 min"."""
    for least, unit_s, name in _UNITS:
        if seconds >= least:
            return f"{seconds / unit_s:,.0f}{SPACE}{name}"
    return f"{max(0.0, seconds):.0f}{SPACE}s"


def number(value: float | None, digits: int = 4) -> str:
    """Format with `digits` significant digits, thousands grouped, from 10^15 on as a power of ten."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    whole = 10 ** (digits - 1) <= abs(value) < 10**15
    return f"{value:,.0f}" if whole else f"{value:,.{digits}g}"


def fixed(value: float | None, digits: int = 4) -> str:
    """Format with exactly `digits` decimals."""
    return NOTHING if value is None else f"{value:,.{digits}f}"


def ago(rfc3339: str) -> str:
    """Format an RFC 3339 time as its age, for example "12 min ago"."""
    return f"{duration((datetime.now(UTC) - datetime.fromisoformat(rfc3339)).total_seconds())} ago"


def moment(rfc3339: str) -> str:
    """Format an RFC 3339 time in UTC to the second; return any other text unchanged."""
    try:
        time = datetime.fromisoformat(rfc3339)
    except ValueError:
        return rfc3339
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def share(part: int, whole: int) -> str:
    """Format "part of whole", for example "3 of 8"."""
    return f"{part:,} of {whole:,}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun, for example "1 block" or "2 blocks"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def left_to_the_table(count: int) -> str:
    """Return the note on variants that a picture leaves out."""
    return f"{counted(count, 'more variant')} {'is' if count == 1 else 'are'} in the table only."


def with_minus(text: str) -> str:
    """Replace the ASCII minus signs of numbers by `MINUS`; hyphens stay."""
    return _HYPHEN_MINUS.sub(MINUS, text)


def capitalised(text: str) -> str:
    """Return `text` with a capital first letter, unless its first word is a name such as val_bpb."""
    if "_" in text.partition(" ")[0]:
        return text
    return f"{text[:1].upper()}{text[1:]}"


def shorten(text: str, longest: int) -> str:
    """Cut `text` to `longest` characters, ending in an ellipsis if it was longer."""
    return text if len(text) <= longest else text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def listed(names: list[str]) -> str:
    """Join names: a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
