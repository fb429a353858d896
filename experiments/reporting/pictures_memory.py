"""The picture of peak memory: one pair of bars per arm against the device's limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.outcomes import Outcome
from experiments.records.receipts import Receipt
from experiments.reporting import series, svg
from experiments.reporting.series import ArmStyle
from experiments.reporting.view import AblationView
from kernels.backends import NODE_CLASSES

WIDTH_IN = 5.6
MOST_BARS = 30
INK, LIMIT = svg.SENTINELS["ink"], svg.SENTINELS["limit"]


class Peak(NamedTuple):
    """The largest memory of an arm's trials, in GiB."""

    allocated: float
    reserved: float
    out_of_memory: bool


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    peaks: Sequence[tuple[str, Peak]]
    """By arm, in the plan's order."""
    not_drawn: int
    limit_gib: float | None
    on_cpu: bool

    @property
    def top(self) -> float:
        return max(peak.reserved for _, peak in self.peaks)

    @property
    def limit_in_view(self) -> float | None:
        """The limit where it lies on the same scale as the bars."""
        near = self.limit_gib is not None and self.limit_gib < 3 * self.top
        return self.limit_gib if near else None


def memory(view: AblationView) -> svg.Picture | None:
    """Draw peak memory of every arm against the device's limit; None where none was recorded."""
    receipts = [r for r in series.receipts_in_time(view) if r.memory is not None]
    found = {arm.name: _peak([r for r in receipts if r.arm == arm.name]) for arm in view.plan.arms}
    peaks = [(arm, peak) for arm, peak in found.items() if peak is not None][:MOST_BARS]
    if not peaks:
        return None
    limits = [r.memory.limit_bytes for r in receipts if r.memory and r.memory.limit_bytes]
    drawing = _Drawing(
        peaks=peaks,
        not_drawn=len(found) - len(peaks),
        limit_gib=min(limits) / 2**30 if limits else None,
        on_cpu=NODE_CLASSES[view.plan.node_class].on_host,
    )
    styles = series.arm_styles(view)
    return svg.draw("memory", "Peak memory", _caption(drawing), lambda figure: _paint(figure, drawing, styles))


def _caption(drawing: _Drawing) -> str:
    sentences = ["Largest peak over all trials of each arm."]
    shades = (
        "in tensors; light: resident set of the process"
        if drawing.on_cpu
        else "in tensors; light: reserved by the allocator"
    )
    sentences.append(f"Dark: {shades}.")
    if any(peak.out_of_memory for _, peak in drawing.peaks):
        sentences.append("Hatched: out of memory, the peak that was reached.")
    if drawing.limit_gib is not None:
        where = "far beyond this scale" if drawing.limit_in_view is None else "the line"
        sentences.append(f"The device has {drawing.limit_gib:.1f} GiB, {where}.")
    if drawing.not_drawn:
        sentences.append(f"{drawing.not_drawn} arms without a reading or beyond the first {MOST_BARS} are not drawn.")
    return " ".join(sentences)


def _paint(figure: Figure, drawing: _Drawing, styles: dict[str, ArmStyle]) -> None:
    figure.set_size_inches(WIDTH_IN, 0.85 + 0.3 * len(drawing.peaks))
    axes = figure.add_subplot()
    for row, (arm, peak) in enumerate(drawing.peaks):
        _bar(axes, row, peak, svg.SENTINELS[styles[arm].role])
    axes.set_xlim(0, max(drawing.top, drawing.limit_in_view or 0) * 1.04)
    if drawing.limit_in_view is not None:
        _mark_limit(axes, drawing.limit_in_view)
    axes.set_ylim(len(drawing.peaks) - 0.4, -0.85)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel("peak memory, GiB")
    _label_rows(axes, [styles[arm].shown for arm, _ in drawing.peaks])
    numbers = axes.twinx()
    numbers.set_ylim(axes.get_ylim())
    _label_rows(numbers, [_numbers(peak) for _, peak in drawing.peaks])


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)


def _mark_limit(axes: Axes, limit_gib: float) -> None:
    axes.axvline(limit_gib, color=LIMIT, linewidth=1.4, linestyle=(0, (4, 2)))
    beside = (limit_gib, -0.72)
    axes.annotate("device limit", beside, (-4, 0), textcoords="offset points", color=LIMIT, ha="right", va="top")


def _peak(receipts: Sequence[Receipt]) -> Peak | None:
    found = [r.memory for r in receipts if r.memory is not None]
    if not found:
        return None
    return Peak(
        allocated=max(m.peak_allocated_bytes for m in found) / 2**30,
        reserved=max(m.peak_reserved_bytes for m in found) / 2**30,
        out_of_memory=any(r.outcome is Outcome.OOM for r in receipts),
    )


def _bar(axes: Axes, row: int, peak: Peak, colour: str) -> None:
    hatch = "////" if peak.out_of_memory else None
    axes.barh(row, peak.reserved, height=0.56, color=colour, alpha=0.35, linewidth=0)
    axes.barh(row, peak.allocated, height=0.56, color=colour, linewidth=0, hatch=hatch)


def _numbers(peak: Peak) -> str:
    digits = 1 if peak.reserved >= 10 else 2 if peak.reserved >= 1 else 3
    text = f"{peak.allocated:.{digits}f} / {peak.reserved:.{digits}f} GiB"
    return text + (", out of memory" if peak.out_of_memory else "")
