"""The picture of the blocks: paired differences in time order above the device clock, or the load."""

from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.analysis.arm_summary import measured_trials
from experiments.analysis.verdicts import Comparison
from experiments.block_numbers import block_number
from experiments.records.receipts import Receipt
from experiments.reporting import wording
from experiments.reporting.pictures import drawing
from experiments.reporting.pictures.drawing import INK, PAPER, SOFT, ArmStyle
from experiments.reporting.verdict_layout import interval_heading
from experiments.reporting.view import AblationView

WIDTH_IN = 8.2
DEFAULT_METRIC = "tokens_per_s"
"""Shown while there is no verdict whose rule names another."""
MOST_PANELS = 8
MOST_BLOCKS = 200

Changes = dict[int, float]
"""By block index: what a variant changes in it against the baseline, in percent."""


def differences(view: AblationView) -> drawing.Picture | None:
    """Draw each variant's change in every block in time order, in percent, and the device clock (or the load) below."""
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
        for axes, (arm, found) in zip(panels, shown.items(), strict=False):
            _difference_panel(axes, found, blocks, styles[arm])
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
    """Return every variant's change in every block where both were measured; variants without any are left out.

    The largest improvement first, as everywhere, once there is an answer.
    """
    arms = [arm.name for arm in view.plan.variants] if view.answer is None else [v.arm for v in view.answer.variants]
    found = {arm: view.changes(arm, metric) for arm in arms}
    return {arm: changes for arm, changes in found.items() if changes}


def _differences_caption(
    view: AblationView, metric: str, changes: dict[str, Changes], blocks: list[int], below: str | None
) -> str:
    drawn = {block for each in changes.values() for block in each}
    left_out_blocks, left_out_panels = len(drawn - set(blocks)), max(0, len(changes) - MOST_PANELS)
    sentences = [
        f"Each marker is one block: by how many percent {wording.metric(metric)} differs from "
        f"{view.plan.baseline.name} in the same block."
    ]
    if view.verdict is not None and drawing.comparisons(view.verdict):
        sentences.append(
            f"Line and tint: the verdict's mean, without the effect of places, and its "
            f"{interval_heading(view.verdict)}, computed on ln(variant{wording.SPACE}/{wording.SPACE}baseline) and "
            "shown as percent; grey band: the margin."
        )
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


def _difference_answer(axes: Axes, view: AblationView, found: Comparison | None) -> None:
    """Draw zero, the margin, and the mean with its interval that the verdict states."""
    if view.answer is None:
        axes.axhline(0, color=SOFT, linewidth=0.8, zorder=1)
    else:
        drawing.rule_lines(axes, view.answer.rule, vertical=False)
    if found is not None:
        axes.axhspan(found.ci_low_pct, found.ci_high_pct, color=INK, alpha=0.10, linewidth=0, zorder=1)
        axes.axhline(found.delta_pct, color=INK, linewidth=1.0, zorder=2)


def _same_scale(panels: Sequence[Axes]) -> None:
    """Give all panels one scale, so that their effects can be compared by eye, with zero in view."""
    bounds = [bound for axes in panels for bound in axes.get_ylim()]
    low, high = min(0.0, *bounds), max(0.0, *bounds)
    low, high = low - 0.08 * (high - low), high + 0.08 * (high - low)
    for axes in panels:
        axes.set_ylim(low, high)


def _condition(view: AblationView, receipts: Sequence[Receipt]) -> tuple[str, dict[str, dict[int, float]]] | None:
    """Return what was recorded of the device: (label, arm -> block -> value), or None."""
    clocks = {(r.arm, r.ids.block_index): _timed_clock_mhz(r) for r in receipts}
    label, values = "median device clock of the timed steps, MHz", clocks
    if not any(value is not None for value in clocks.values()):
        label = "load average just before the trial"
        values = {(r.arm, r.ids.block_index): r.environment.load_average_before for r in receipts}
    found: dict[str, dict[int, float]] = {}
    for (arm, block), value in values.items():
        if value is not None:
            found.setdefault(arm, {})[block] = value
    return (label, {arm.name: found[arm.name] for arm in view.plan.arms if arm.name in found}) if found else None


def _timed_clock_mhz(receipt: Receipt) -> float | None:
    """Return the median device clock of the timed steps; None where none was recorded."""
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
