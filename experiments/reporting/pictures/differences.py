"""Picture of the blocks: paired differences in time order, above the device clock or the load."""

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ablate.experiments.analysis.arm_summary import measured_trials
from ablate.experiments.analysis.verdicts import Comparison
from ablate.experiments.block_numbers import block_number
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures import drawing
from ablate.experiments.reporting.pictures.drawing import INK, PAPER, SOFT, ArmStyle
from ablate.experiments.reporting.verdict_layout import interval_heading, over_seeds
from ablate.experiments.reporting.view import AblationView

WIDTH_IN = 8.2
DEFAULT_METRIC = "tokens_per_s"
"""Metric without a verdict."""
MOST_PANELS = 8
MOST_BLOCKS = 200

Changes = dict[int, float]
"""Change of a variant against the baseline in percent, by block index."""


def differences(view: AblationView) -> drawing.Picture | None:
    """Draw each variant's change per block in time order, in percent, above the device clock or the load."""
    metric = view.answer.rule.metric if view.answer else DEFAULT_METRIC
    changes = _changes(view, metric)
    if not changes:
        return None
    receipts = measured_trials(view.receipts)
    blocks = list(drawing.thin(list(dict.fromkeys(r.ids.block_index for r in receipts)), MOST_BLOCKS))
    shown = dict(list(changes.items())[:MOST_PANELS])
    below = _condition(view, receipts)

    def paint(figure: Figure) -> None:
        num_rows = len(shown) + (below is not None)
        figure.set_size_inches(WIDTH_IN, 0.75 + 1.2 * num_rows)
        panels = list(figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0])
        styles, compared = drawing.styles(view), drawing.comparisons(view.verdict)
        for axes, (arm, own) in zip(panels, shown.items(), strict=False):
            _difference_panel(axes, own, blocks, styles[arm])
            _difference_answer(axes, view, compared.get(arm))
        _same_scale(panels[: len(shown)])
        if below is not None:
            _condition_panel(panels[-1], below, blocks, styles)
        panels[-1].set_xticks(*_block_ticks(blocks))
        panels[-1].set_xlabel("block, in the order in which they ran")
        figure.align_ylabels(panels)

    caption = _differences_caption(view, metric, changes, blocks, None if below is None else below[0])
    return drawing.draw("differences", "Paired differences, block by block", caption, paint)


def _changes(view: AblationView, metric: str) -> dict[str, Changes]:
    """Return the changes of every variant that has any; with an answer, the largest improvement comes first."""
    arms = [arm.name for arm in view.plan.variants] if view.answer is None else [v.arm for v in view.answer.variants]
    return {arm: changes for arm in arms if (changes := view.changes(arm, metric))}


_POSITION_AND_LOGARITHM = (
    f"the verdict's mean, corrected for the position in the block, computed on ln(variant{wording.SPACE}/"
    f"{wording.SPACE}baseline) and shown in percent"
)


def _differences_caption(
    view: AblationView, metric: str, changes: dict[str, Changes], blocks: list[int], below: str | None
) -> str:
    drawn = {block for each in changes.values() for block in each}
    left_out_blocks, left_out_panels = len(drawn - set(blocks)), max(0, len(changes) - MOST_PANELS)
    sentences = [
        f"Each marker is one block: the difference of {wording.metric(metric)} from {view.plan.baseline.name} in the "
        "same block, in percent."
    ]
    if view.verdict is not None and drawing.comparisons(view.verdict):
        mean = "the verdict's mean over the seeds" if over_seeds(view.verdict) else _POSITION_AND_LOGARITHM
        sentences.append(f"Line and tint: {mean}, and its {interval_heading(view.verdict)}. Grey band: the margin.")
    if below:
        sentences.append(f"Bottom: {below}, for every arm.")
    if left_out_blocks:
        sentences.append(f"{left_out_blocks} blocks between those shown are not drawn.")
    if left_out_panels:
        sentences.append(wording.left_to_the_table(left_out_panels))
    return " ".join(sentences)


def _difference_panel(axes: Axes, changes: Changes, blocks: list[int], style: ArmStyle) -> None:
    xs = [place for place, block in enumerate(blocks) if block in changes]
    ys = [changes[blocks[x]] for x in xs]
    size = 6.5 if len(blocks) <= 60 else 3.5
    edge = {"markeredgecolor": PAPER, "markeredgewidth": 0.7}
    axes.vlines(xs, 0, ys, color=style.colour, linewidth=0.8, alpha=0.55, zorder=3)
    axes.plot(xs, ys, style.marker, color=style.colour, markersize=size * style.grown, zorder=4, **edge)  # type: ignore[arg-type]
    axes.set_title(style.shown)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_ylabel("%")
    axes.yaxis.set_major_formatter(lambda value, _: wording.signed(value))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _difference_answer(axes: Axes, view: AblationView, comparison: Comparison | None) -> None:
    """Draw zero, the margin, and the verdict's mean with its interval."""
    if view.answer is None:
        axes.axhline(0, color=SOFT, linewidth=0.8, zorder=1)
    else:
        drawing.rule_lines(axes, view.answer.rule, vertical=False)
    if comparison is not None:
        axes.axhspan(comparison.ci_low_pct, comparison.ci_high_pct, color=INK, alpha=0.10, linewidth=0, zorder=1)
        axes.axhline(comparison.delta_pct, color=INK, linewidth=1.0, zorder=2)


def _same_scale(panels: Sequence[Axes]) -> None:
    """Give all panels the same scale, including zero, so that readers can compare them."""
    bounds = [bound for axes in panels for bound in axes.get_ylim()]
    low, high = min(0.0, *bounds), max(0.0, *bounds)
    low, high = low - 0.08 * (high - low), high + 0.08 * (high - low)
    for axes in panels:
        axes.set_ylim(low, high)


def _condition(view: AblationView, receipts: Sequence[Receipt]) -> tuple[str, dict[str, dict[int, float]]] | None:
    """Return the recorded clock or load as (label, arm -> block -> value), or None."""
    clocks = {(r.arm, r.ids.block_index): _timed_clock_mhz(r) for r in receipts}
    label, values = "median device clock of the timed steps, MHz", clocks
    if not any(value is not None for value in clocks.values()):
        label = "load average just before the trial"
        values = {(r.arm, r.ids.block_index): r.environment.load_average_before for r in receipts}
    by_arm: dict[str, dict[int, float]] = {}
    for (arm, block), value in values.items():
        if value is not None:
            by_arm.setdefault(arm, {})[block] = value
    return (label, {arm.name: by_arm[arm.name] for arm in view.plan.arms if arm.name in by_arm}) if by_arm else None


def _timed_clock_mhz(receipt: Receipt) -> float | None:
    """Return the median device clock of the timed steps in MHz; None without records."""
    clocks = [s.clock_mhz for s in receipt.steps if s.phase == "timed" and s.clock_mhz is not None]
    return median(clocks) if clocks else None


def _condition_panel(
    axes: Axes, below: tuple[str, dict[str, dict[int, float]]], blocks: list[int], styles: dict[str, ArmStyle]
) -> None:
    label, values = below
    place = {block: i for i, block in enumerate(blocks)}
    for arm, by_block in list(values.items())[: MOST_PANELS + 1]:
        style = styles[arm]
        points = sorted((place[block], value) for block, value in by_block.items() if block in place)
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(
            xs,
            ys,
            linestyle=style.line,
            marker=style.marker,
            color=style.colour,
            linewidth=0.9,
            markersize=(4 if len(blocks) <= 60 else 2) * style.grown,
            label=style.shown,
        )
    axes.set_title(label)
    axes.set_ylabel("MHz" if label.endswith("MHz") else "load")
    axes.grid(axis="y")
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), handlelength=2.2, borderaxespad=0.2)


def _block_ticks(blocks: list[int]) -> tuple[list[int], list[str]]:
    places = list(drawing.thin(range(len(blocks)), 20))
    return places, [str(block_number(blocks[i])) for i in places]
