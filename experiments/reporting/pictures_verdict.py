"""Pictures of the answer: forest plot of the variants, and paired differences in time order above the device clock."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.analysis.verdicts import VariantVerdict, Verdict
from experiments.block_numbers import block_number
from experiments.records.receipts import Receipt
from experiments.reporting import series, svg, wording
from experiments.reporting.series import ArmStyle, Pair
from experiments.reporting.view import AblationView

WIDTH_IN = 8.2
NARROW_IN = 5.6
"""Narrow enough to be read on a phone without scrolling."""
MOST_VARIANTS = 30
MOST_PANELS = 8
MOST_BLOCKS = 200
INK, SOFT, BAND, PAPER = (svg.SENTINELS[role] for role in ("ink", "soft", "band", "paper"))


def forest(view: AblationView) -> svg.Picture | None:
    """Draw every variant's effect with its interval, the margin band and the adoption line; None without a verdict."""
    if view.verdict is None or not any(v.primary for v in view.verdict.variants):
        return None
    verdict, rule = view.verdict, wording.primary_rule(view.verdict.rule)
    shown = verdict.variants[:MOST_VARIANTS]
    left_out = len(verdict.variants) - len(shown)
    caption = (
        f"Change of {wording.metric(rule.metric)} against {verdict.baseline}, in percent. "
        f"Marker: mean over blocks; thick line: 90{wording.SPACE}% interval; thin line: 95{wording.SPACE}% interval. "
        + (
            f"Shaded: the practical margin of {wording.plain_percent(rule.margin_pct)} either way. "
            * bool(rule.margin_pct)
        )
        + (f"Dashed: adopt from {wording.percent(rule.adopt_if_pct)}. " if rule.adopt_if_pct else "")
        + (f"{left_out} more variants are in the table only. " if left_out else "")
    ).strip()

    def paint(figure: Figure) -> None:
        figure.set_size_inches(NARROW_IN, 0.85 + 0.3 * len(shown))
        axes = figure.add_subplot()
        _rule_lines(axes, rule, vertical=True)
        styles = series.arm_styles(view)
        for row, variant in enumerate(shown):
            _forest_row(axes, row, variant, styles[variant.arm])
        _forest_frame(axes, shown, styles, wording.metric(rule.metric))

    return svg.draw("forest", "Effect of every variant", caption, paint)


def _rule_lines(axes: Axes, rule: wording.PrimaryRule, *, vertical: bool) -> None:
    span, line = (axes.axvspan, axes.axvline) if vertical else (axes.axhspan, axes.axhline)
    if rule.margin_pct:
        span(-rule.margin_pct, rule.margin_pct, color=BAND, linewidth=0, zorder=0)
    line(0, color=SOFT, linewidth=0.8, zorder=1)
    if rule.adopt_if_pct and vertical:
        line(rule.adopt_if_pct, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)


def _forest_row(axes: Axes, row: int, variant: VariantVerdict, style: ArmStyle) -> None:
    colour, found = svg.SENTINELS[style.role], variant.primary
    if found is None:
        return
    axes.plot([found.ci_low_pct, found.ci_high_pct], [row, row], color=colour, linewidth=1.3, zorder=2)
    axes.plot([found.ci90_low_pct, found.ci90_high_pct], [row, row], color=colour, linewidth=4.0, zorder=2)
    axes.plot(found.delta_pct, row, style.marker, color=colour, markersize=7, markeredgecolor=PAPER, markeredgewidth=1)


def _forest_frame(axes: Axes, shown: Sequence[VariantVerdict], styles: dict[str, ArmStyle], metric: str) -> None:
    rows = range(len(shown))
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks(rows, [styles[v.arm].shown for v in shown])
    axes.margins(x=0.08)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel(f"change of {metric} against the baseline, %")
    axes.xaxis.set_major_formatter(lambda value, _: wording.signed(value))
    right = axes.twinx()
    right.set_ylim(axes.get_ylim())
    right.set_yticks(rows, [_numbers(v) for v in shown])
    right.tick_params(axis="y", length=0, labelcolor=INK)
    right.spines["left"].set_visible(False)


def _numbers(variant: VariantVerdict) -> str:
    found = variant.primary
    if found is None:
        return f"{variant.verdict.value}: no statistics"
    return f"{wording.percent(found.delta_pct)} ({wording.interval(found.ci_low_pct, found.ci_high_pct)})"


def differences(view: AblationView) -> svg.Picture | None:
    """Draw each variant's difference in every block in time order, with the device clock (or the load) below."""
    metric = series.shown_metric(view)
    pairs = series.paired(view, metric)
    if not pairs:
        return None
    receipts = series.measured(series.receipts_in_time(view))
    blocks = list(series.thin(series.blocks_in_time(receipts), MOST_BLOCKS))
    shown = dict(list(pairs.items())[:MOST_PANELS])
    below = _condition(view, receipts)

    def paint(figure: Figure) -> None:
        num_rows = len(shown) + (below is not None)
        figure.set_size_inches(WIDTH_IN, 0.75 + 1.2 * num_rows)
        panels = list(figure.subplots(num_rows, 1, sharex=True, squeeze=False)[:, 0])
        styles = series.arm_styles(view)
        for axes, (arm, found) in zip(panels, shown.items(), strict=False):
            _difference_panel(axes, found, blocks, styles[arm])
            _difference_answer(axes, view.verdict, arm)
        _same_scale(panels[: len(shown)])
        if below is not None:
            _condition_panel(panels[-1], below, blocks, styles)
        panels[-1].set_xticks(*_block_ticks(blocks))
        panels[-1].set_xlabel("block, in the order in which they ran")
        figure.align_ylabels(panels)

    return svg.draw(
        "differences", "Paired differences, block by block", _caption(view, metric, pairs, blocks, below), paint
    )


def _caption(
    view: AblationView,
    metric: str,
    pairs: dict[str, list[Pair]],
    blocks: list[int],
    below: "tuple[str, dict[str, dict[int, float]]] | None",
) -> str:
    found = {pair.block_index for each in pairs.values() for pair in each}
    left_out_blocks, left_out_panels = len(found - set(blocks)), max(0, len(pairs) - MOST_PANELS)
    return (
        f"Each marker is one block: {wording.metric(metric)} of the variant against {view.plan.baseline.name} in the "
        f"same block, 100{wording.SPACE}ln(variant{wording.SPACE}/{wording.SPACE}baseline)."
        + (f" Line and tint: mean and 95{wording.SPACE}% interval; grey band: the margin." if view.verdict else "")
        + (f" Bottom: {below[0]}, for every arm." if below else "")
        + (f" {left_out_blocks} blocks between those shown are not drawn." if left_out_blocks else "")
        + (f" {left_out_panels} more variants are in the table only." if left_out_panels else "")
    )


def _difference_panel(axes: Axes, pairs: Sequence[Pair], blocks: list[int], style: ArmStyle) -> None:
    place = {block: i for i, block in enumerate(blocks)}
    drawn = [pair for pair in pairs if pair.block_index in place]
    xs, ys = [place[p.block_index] for p in drawn], [p.difference_pct for p in drawn]
    colour = svg.SENTINELS[style.role]
    size = 6.5 if len(blocks) <= 60 else 3.5
    axes.vlines(xs, 0, ys, color=colour, linewidth=0.8, alpha=0.55, zorder=3)
    axes.plot(xs, ys, style.marker, color=colour, markersize=size, markeredgecolor=PAPER, markeredgewidth=0.7, zorder=4)
    axes.set_title(style.shown)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_ylabel("%")
    axes.yaxis.set_major_formatter(lambda value, _: wording.signed(value))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def _difference_answer(axes: Axes, verdict: Verdict | None, arm: str) -> None:
    """Draw the margin, and the mean with its interval that the verdict states."""
    rule = wording.primary_rule(verdict.rule) if verdict else wording.PrimaryRule()
    _rule_lines(axes, rule, vertical=False)
    found = next((v.primary for v in verdict.variants if v.arm == arm), None) if verdict else None
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
    clocks = {(r.arm, r.ids.block_index): series.timed_clock_mhz(r) for r in receipts}
    label, values = "median device clock of the timed steps, MHz", clocks
    if not any(value is not None for value in clocks.values()):
        label = "load average just before the trial"
        values = {(r.arm, r.ids.block_index): r.environment.load_average_before for r in receipts}
    found: dict[str, dict[int, float]] = {}
    for (arm, block), value in values.items():
        if value is not None:
            found.setdefault(arm, {})[block] = value
    return (label, {arm.name: found[arm.name] for arm in view.plan.arms if arm.name in found}) if found else None


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
            color=svg.SENTINELS[style.role],
            linewidth=0.9,
            markersize=4 if len(blocks) <= 60 else 2,
            label=style.shown,
        )
    axes.set_title(label)
    axes.set_ylabel("MHz" if label.endswith("MHz") else "load")
    axes.grid(axis="y")
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), handlelength=2.2, borderaxespad=0.2)


def _block_ticks(blocks: list[int]) -> tuple[list[int], list[str]]:
    places = list(series.thin(range(len(blocks)), 20))
    return places, [str(block_number(blocks[i])) for i in places]
