"""What tables and pictures are made from: receipts of a view by arm and block, paired differences, shown names."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TypeVar

from experiments.design.metrics import METRICS
from experiments.outcomes import Outcome
from experiments.records.receipts import Receipt, read_metric
from experiments.reporting.view import AblationView

T = TypeVar("T")
DEFAULT_METRIC = "tokens_per_s"
ARM_SHADES = 8
MARKERS = "osD^vPX*h"
LINES = ("-", "--", "-.", ":")
LONGEST_NAME = 26


@dataclass(frozen=True, kw_only=True)
class ArmStyle:
    """How one arm looks in every picture: colour role, marker and line tell it apart, each on its own."""

    name: str
    shown: str
    """The name, shortened where it is too long for a picture."""
    role: str
    marker: str
    line: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One variant and the baseline of the same block."""

    block_index: int
    variant: Receipt
    baseline: Receipt
    difference_pct: float
    """100 * ln(variant / baseline)."""


def arm_styles(view: AblationView) -> dict[str, ArmStyle]:
    """Give every arm of the plan its looks, the baseline first and grey."""
    return {
        arm.name: ArmStyle(
            name=arm.name,
            shown=shorten(arm.name),
            role="arm-0" if i == 0 else f"arm-{1 + (i - 1) % (ARM_SHADES - 1)}",
            marker=MARKERS[i % len(MARKERS)],
            line=LINES[i % len(LINES)],
        )
        for i, arm in enumerate(view.plan.arms)
    }


def shorten(text: str, longest: int = LONGEST_NAME) -> str:
    """Cut `text` to `longest` characters, with an ellipsis where something is missing."""
    return text if len(text) <= longest else text[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def receipts_in_time(view: AblationView) -> list[Receipt]:
    """Return every receipt in the order in which the trials started."""
    found = [trial.receipt for trial in view.trials if trial.receipt is not None]
    return sorted(found, key=lambda r: (r.started_at, r.ids.block_index, r.ids.position))


def measured(receipts: Iterable[Receipt], arm: str | None = None) -> list[Receipt]:
    """Keep the receipts, of `arm` if given, that carry a valid measurement."""
    return [
        r for r in receipts if r.outcome is Outcome.MEASURED and r.summary is not None and (arm is None or r.arm == arm)
    ]


def shown_metric(view: AblationView) -> str:
    """Name the metric of the paired differences: the rule's primary one."""
    variants = view.verdict.variants if view.verdict else ()
    names = [v.primary.metric for v in variants if v.primary is not None]
    return names[0] if names and names[0] in METRICS else DEFAULT_METRIC


def paired(view: AblationView, metric: str) -> dict[str, list[Pair]]:
    """Pair every variant's measured trials with the baseline of their block, in time order; empty variants left out."""
    receipts = measured(receipts_in_time(view))
    baselines = {r.ids.block_index: r for r in receipts if r.arm == view.plan.baseline.name}
    pairs: dict[str, list[Pair]] = {arm.name: [] for arm in view.plan.arms[1:]}
    for receipt in receipts:
        base = baselines.get(receipt.ids.block_index)
        ratio = _ratio(receipt, base, metric)
        if receipt.arm in pairs and base is not None and ratio > 0:
            pair = Pair(
                block_index=receipt.ids.block_index,
                variant=receipt,
                baseline=base,
                difference_pct=100 * math.log(ratio),
            )
            pairs[receipt.arm].append(pair)
    return {arm: found for arm, found in pairs.items() if found}


def _ratio(receipt: Receipt, base: Receipt | None, metric: str) -> float:
    """Return variant / baseline; 0 where one of the two has no positive, finite value."""
    values = [read_metric(METRICS[metric], r) or 0.0 for r in (receipt, base) if r is not None]
    return values[0] / values[1] if len(values) == 2 and all(0 < v < math.inf for v in values) else 0.0


def blocks_in_time(receipts: Sequence[Receipt]) -> list[int]:
    """Return block indices in the order in which they started."""
    seen: dict[int, None] = {}
    for receipt in receipts:
        seen.setdefault(receipt.ids.block_index)
    return list(seen)


def timed_clock_mhz(receipt: Receipt) -> float | None:
    """Return the median device clock of the timed steps; None where none was recorded."""
    clocks = [s.clock_mhz for s in receipt.steps if s.phase == "timed" and s.clock_mhz is not None]
    return median(clocks) if clocks else None


def thin(items: Sequence[T], most: int) -> Sequence[T]:
    """Keep at most `most` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def by_phase(receipt: Receipt, most: int) -> dict[str, list[tuple[float, float]]]:
    """Return (place in the trial from 0 to 1, milliseconds) of at most `most` steps, grouped by phase."""
    last = max(len(receipt.steps) - 1, 1)
    steps = thin(receipt.steps, most)
    return {
        phase: [(step.index / last, 1000 * step.seconds) for step in group]
        for phase, group in groupby(steps, key=lambda step: step.phase)
    }
