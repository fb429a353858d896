"""Pictures of memory: peaks as a pair of bars per arm with the device's limit, and the course of one profiled step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ablate.experiments.analysis.verdicts import ArmSummary
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import Outcome
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures import drawing
from ablate.experiments.reporting.pictures.drawing import ArmStyle
from ablate.experiments.reporting.step_traces import MIB, traces
from ablate.experiments.reporting.view import AblationView

WIDTH_IN = 5.6
MOST_BARS = 30
STEP_WIDTH_IN, STEP_HEIGHT_IN = 8.2, 3.0
MOST_LINES = 9
"""The baseline and eight variants."""
INK, LIMIT = drawing.SENTINELS["ink"], drawing.SENTINELS["limit"]


class PeakMemory(NamedTuple):
    """The largest memory of an arm's trials, in GiB."""

    allocated: float
    reserved: float
    out_of_memory: bool


@dataclass(frozen=True, kw_only=True)
class _Bars:
    peaks: Sequence[tuple[str, PeakMemory]]
    """By arm, in the plan's order."""
    not_drawn: int
    limit_gib: float | None
    on_cpu: bool
    only_resident: bool
    """Whether there are no other peaks than resident sets, as for commands on the host."""

    @property
    def top(self) -> float:
        return max(peak.reserved for _, peak in self.peaks)

    @property
    def limit_in_view(self) -> float | None:
        """The limit, if it fits the scale of the bars."""
        near = self.limit_gib is not None and self.limit_gib < 3 * self.top
        return self.limit_gib if near else None


def memory(view: AblationView) -> drawing.Picture | None:
    """Draw every arm's peak memory and the device's limit; None without recorded peaks."""
    peaks = [(name, peak) for name, arm in view.arms.items() if (peak := _peak(arm)) is not None][:MOST_BARS]
    if not peaks:
        return None
    on_host = NODE_CLASSES[view.plan.node_class].on_host
    limits = [r.memory.limit_bytes for r in view.receipts if r.memory and r.memory.limit_bytes]
    bars = _Bars(
        peaks=peaks,
        not_drawn=len(view.arms) - len(peaks),
        limit_gib=min(limits) / 2**30 if limits else None,
        on_cpu=on_host,
        only_resident=on_host and view.plan.baseline.config.own_process,
    )
    styles = drawing.arm_styles(list(view.arms))
    return drawing.draw("memory", "Peak memory", _caption(bars), lambda figure: _paint(figure, bars, styles))


def _caption(bars: _Bars) -> str:
    light = "resident set of the process" if bars.on_cpu else "reserved by the allocator"
    parts = "Resident set of the largest process" if bars.only_resident else f"Dark: in tensors. Light: {light}"
    sentences = [f"Largest peak over all trials of each arm. {parts}."]
    if any(peak.out_of_memory for _, peak in bars.peaks):
        sentences.append("Hatched: the arm ran out of memory at this peak.")
    if bars.limit_gib is not None:
        where = "far beyond this scale" if bars.limit_in_view is None else "the line"
        sentences.append(f"The device has {wording.gib(bars.limit_gib * 2**30)}, {where}.")
    if bars.not_drawn:
        without = f"without a reading or beyond the first {MOST_BARS}"
        sentences.append(f"Not drawn: {wording.counted(bars.not_drawn, 'arm')} {without}.")
    return " ".join(sentences)


def _paint(figure: Figure, bars: _Bars, styles: dict[str, ArmStyle]) -> None:
    figure.set_size_inches(WIDTH_IN, 0.85 + 0.3 * len(bars.peaks))
    axes = figure.add_subplot()
    for row, (arm, peak) in enumerate(bars.peaks):
        _bar(axes, row, peak, styles[arm].colour)
    axes.set_xlim(0, max(bars.top, bars.limit_in_view or 0) * 1.04)
    if bars.limit_in_view is not None:
        _mark_limit(axes, bars.limit_in_view)
    axes.set_ylim(len(bars.peaks) - 0.4, -0.85)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.set_xlabel("peak memory, GiB")
    _label_rows(axes, [styles[arm].shown for arm, _ in bars.peaks])
    numbers = axes.twinx()
    numbers.set_ylim(axes.get_ylim())
    _label_rows(numbers, [_numbers(peak) for _, peak in bars.peaks])


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)


def _mark_limit(axes: Axes, limit_gib: float) -> None:
    axes.axvline(limit_gib, color=LIMIT, linewidth=1.4, linestyle=(0, (4, 2)))
    beside = (limit_gib, -0.72)
    axes.annotate("device limit", beside, (-4, 0), textcoords="offset points", color=LIMIT, ha="right", va="top")


def _peak(arm: ArmSummary) -> PeakMemory | None:
    if arm.peak_allocated_bytes is None or arm.peak_reserved_bytes is None:
        return None
    return PeakMemory(
        allocated=arm.peak_allocated_bytes / 2**30,
        reserved=arm.peak_reserved_bytes / 2**30,
        out_of_memory=Outcome.OOM in arm.outcomes,
    )


def _bar(axes: Axes, row: int, peak: PeakMemory, colour: str) -> None:
    hatch = "////" if peak.out_of_memory else None
    axes.barh(row, peak.reserved, height=0.56, color=colour, alpha=0.35, linewidth=0)
    axes.barh(row, peak.allocated, height=0.56, color=colour, linewidth=0, hatch=hatch)


def _numbers(peak: PeakMemory) -> str:
    digits = 1 if peak.reserved >= 10 else 2 if peak.reserved >= 1 else 3
    text = f"{peak.allocated:.{digits}f} / {peak.reserved:.{digits}f} GiB"
    return text + (", out of memory" if peak.out_of_memory else "")


def step_memory(view: AblationView) -> drawing.Picture | None:
    """Draw the bytes in tensors over the profiled step of each arm; None without a profiled step over time."""
    with_memory = {arm: trace for arm, trace in traces(view).items() if trace.memory}
    if not with_memory:
        return None
    shown = [*with_memory][:MOST_LINES]
    left = len(with_memory) - len(shown)
    caption = (
        "Bytes in tensors above those at the start of the step, in one step after the window under torch's profiler, "
        "which slows it down. Of the first block."
        + (f" {wording.counted(left, 'more arm')} not drawn." if left else "")
    )

    def paint(figure: Figure) -> None:
        figure.set_size_inches(STEP_WIDTH_IN, STEP_HEIGHT_IN)
        axes = figure.add_subplot()
        styles = drawing.styles(view)
        for arm in shown:
            moments = [(0.0, 0), *with_memory[arm].memory]
            axes.plot(
                [us / 1e3 for us, _ in moments],
                [num_bytes / MIB for _, num_bytes in moments],
                color=styles[arm].colour,
                linestyle=styles[arm].line,
                drawstyle="steps-post",
                linewidth=1.3,
                label=styles[arm].shown,
            )
        axes.set_xlabel("time in the step, ms")
        axes.set_ylabel("memory in tensors, MiB")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=4, handlelength=2.6)

    return drawing.draw("step-memory", "Memory over one step", caption, paint)
