"""Pictures of the trials: every step's time, and loss curves over the baseline's envelope."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablate.experiments.analysis.arm_summary import measured_trials
from ablate.experiments.block_numbers import block_number
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures import drawing
from ablate.experiments.reporting.pictures.drawing import ArmStyle
from ablate.experiments.reporting.view import AblationView

WIDTH_IN = 8.2
MOST_TRIALS = 120
MOST_STEPS = 3000
MOST_CURVES = 8
MOST_CURVE_POINTS = 400
MOST_LOGGED = 3
"""Metrics that a program logged: the deciding one, and others."""
SOFT, GRID, BAND = (drawing.SENTINELS[role] for role in ("soft", "grid", "band"))


def step_times(view: AblationView) -> drawing.Picture | None:
    """Draw the time of every step of every trial, in time order; None without steps."""
    with_steps = [r for r in view.receipts if r.steps]
    if not with_steps:
        return None
    receipts = list(drawing.thin(with_steps, MOST_TRIALS))
    per_trial = max(4, MOST_STEPS // len(receipts))
    thinned = any(len(r.steps) > per_trial for r in receipts)
    caption = (
        "One strip per trial, in running order; lines separate the blocks. Filled: timed steps, the measured window. "
        "Open: warm-up. Cross: step 0 with compilation. The scale is logarithmic. Warm-up and step 0 are not part of "
        "the statistics. Below: only the timed steps, on the scale of 98\N{NO-BREAK SPACE}% of them."
        + (
            f" {wording.share(len(receipts), len(with_steps))} trials are drawn, evenly spread."
            * (len(receipts) < len(with_steps))
        )
        + (f" At most {per_trial} steps of each trial are drawn, evenly spread." if thinned else "")
    )

    def paint(figure: Figure) -> None:
        figure.set_size_inches(WIDTH_IN, 4.4)
        full, zoomed = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.25))
        styles = drawing.arm_styles([arm.name for arm in view.plan.arms])
        for i, receipt in enumerate(receipts):
            phases, crowded = _by_phase(receipt, per_trial), len(receipts) > 40
            _strip(full, i, phases, styles[receipt.arm], crowded=crowded)
            _strip(zoomed, i, {"timed": phases.get("timed", [])}, styles[receipt.arm], crowded=crowded)
        _block_frame((full, zoomed), receipts)
        _milliseconds(full)
        _magnify(zoomed, receipts)
        _arm_legend(full, [styles[arm.name] for arm in view.plan.arms if any(r.arm == arm.name for r in receipts)])

    return drawing.draw("steps", "Every step of every trial", caption, paint)


def _by_phase(receipt: Receipt, most: int) -> dict[str, list[tuple[float, float]]]:
    """Return (place in the trial from 0 to 1, ms) of at most `most` steps, by phase."""
    last = max(len(receipt.steps) - 1, 1)
    steps = drawing.thin(receipt.steps, most)
    return {
        phase: [(step.index / last, 1000 * step.seconds) for step in group]
        for phase, group in groupby(steps, key=lambda step: step.phase)
    }


def _strip(
    axes: Axes, place: int, phases: dict[str, list[tuple[float, float]]], style: ArmStyle, *, crowded: bool
) -> None:
    colour, size = style.colour, 1.8 if crowded else 3.0
    looks = {
        "compile": {"marker": "x", "markersize": size + 2, "markeredgewidth": 1.1},
        "warmup": {"marker": style.marker, "markersize": size + 0.8, "markerfacecolor": "none", "markeredgewidth": 0.7},
        "timed": {"marker": style.marker, "markersize": size, "markeredgewidth": 0},
    }
    for phase, points in phases.items():
        finite = [(place + 0.1 + 0.8 * x, y) for x, y in points if math.isfinite(y) and y > 0]
        if finite:
            xs, ys = zip(*finite, strict=True)
            axes.plot(xs, ys, linestyle="none", color=colour, **looks[phase])  # type: ignore[arg-type]  # plain keywords


def _block_frame(panels: Sequence[Axes], receipts: Sequence[Receipt]) -> None:
    """Separate blocks by lines and name them below the last panel."""
    edges = [i for i, (a, b) in enumerate(pairwise(receipts), 1) if a.ids.block_index != b.ids.block_index]
    for axes in panels:
        for edge in edges if len(edges) <= 40 else []:
            axes.axvline(edge, color=GRID, linewidth=0.8, zorder=0)
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(0, len(receipts))
    groups = list(drawing.thin(list(pairwise([0, *edges, len(receipts)])), 20))
    names = [str(block_number(receipts[low].ids.block_index)) for low, _ in groups]
    panels[-1].set_xticks([(low + high) / 2 for low, high in groups], names)
    panels[-1].set_xlabel("block, in the order in which they ran")


def _magnify(axes: Axes, receipts: Sequence[Receipt]) -> None:
    """Scale the axis to 98 % of the timed steps."""
    timed = sorted(
        1000 * s.seconds for r in receipts for s in r.steps if s.phase == "timed" and math.isfinite(s.seconds)
    )
    if timed:
        low, high = timed[len(timed) // 100], timed[-1 - len(timed) // 100]
        room = 0.08 * (high - low) or 0.01 * high
        axes.set_ylim(low - room, high + room)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_ylabel("timed steps, ms")
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _milliseconds(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_ylabel("step time, ms")
    axes.yaxis.set_minor_formatter(lambda *_: "")
    low, high = axes.get_ylim()
    ticks = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    axes.set_yticks(ticks, [wording.number(tick) for tick in ticks])
    axes.set_yticks([], minor=True)


def _arm_legend(axes: Axes, styles: Sequence[ArmStyle]) -> None:
    handles = [
        Line2D([], [], color=s.colour, marker=s.marker, linestyle="none", markersize=5, label=s.shown)
        for s in styles[:12]
    ]
    columns = 5 if max((len(s.shown) for s in styles), default=0) <= 14 else 3
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncol=columns, handletextpad=0.2)


def losses(view: AblationView) -> drawing.Picture | None:
    """Draw mean loss curves over the baseline's envelope, and each variant's distance; None without baseline steps."""
    whole = view.whole_blocks
    trials = {arm.name: [r for r in measured_trials(whole.of(arm.name)) if _curve(r)] for arm in view.plan.arms}
    arms = [arm for arm, own in trials.items() if own]
    baseline = view.plan.baseline.name
    if baseline not in arms:
        return None
    shown = arms[: MOST_CURVES + 1]
    curves = {arm: [_curve(r) for r in trials[arm]] for arm in shown}
    seeds = [r.seed for r in trials[baseline]]
    repeats = len(seeds) - len(set(seeds))
    caption = (
        "Left: mean training loss of each arm over its measured trials. Grey: the range of the "
        f"{wording.counted(len(seeds), 'trial')} of {baseline}. "
        f"Right: mean distance of each arm from the mean of {baseline}. "
        + (
            "Grey: the range of the baseline's repeats with the same seed. "
            if repeats
            else "No seed was repeated, so there is no envelope of repeats. "
        )
        + "A loss inside the envelope is no evidence of a change. A lower loss after so few steps is not a benefit."
        + (f" Not drawn: {wording.counted(len(arms) - len(shown), 'more arm')}." if len(arms) > len(shown) else "")
    )

    def paint(figure: Figure) -> None:
        figure.set_size_inches(WIDTH_IN, 2.9)
        left, right = figure.subplots(1, 2)
        styles = drawing.arm_styles([arm.name for arm in view.plan.arms])
        _envelope(right, _repeat_spread(curves[baseline], seeds))
        _paint_curves(left, right, curves, baseline, styles)
        _loss_frame(left, view.with_loss_unit("loss"))
        _loss_frame(right, view.with_loss_unit("distance from the baseline"))

    return drawing.draw("losses", "Loss curves", caption, paint)


def logged_curves(view: AblationView) -> drawing.Picture | None:
    """Draw the metrics that the program logged or printed, in their order; None without one of the baseline."""
    whole, baseline = view.whole_blocks, view.plan.baseline.name
    trials = {arm.name: [r for r in measured_trials(whole.of(arm.name)) if r.program] for arm in view.plan.arms}
    deciding = view.verdict.rule["primary"]["metric"] if view.verdict else None
    names = {name for receipt in trials.get(baseline, ()) for name in _logged(receipt)}
    metrics = sorted(names, key=lambda name: (name != deciding, name))
    shown, arms = metrics[:MOST_LOGGED], [arm for arm, own in trials.items() if own][: MOST_CURVES + 1]
    if not shown:
        return None
    curves = {name: {arm: [_logged(r).get(name, {}) for r in trials[arm]] for arm in arms} for name in shown}
    caption = (
        f"Numbers that the program logged, by step, or printed, by line. Left: the mean of each arm. Grey: the "
        f"range of the {wording.counted(len(trials[baseline]), 'trial')} of {baseline}. Right: mean distance of each "
        f"arm from the mean of {baseline}. Only the last number of a trial counts."
        + (f" Not drawn: {', '.join(metrics[MOST_LOGGED:])}." if len(metrics) > MOST_LOGGED else "")
        + (f" {len(trials) - len(arms)} more arms are not drawn." if len(trials) > len(arms) else "")
    )

    def paint(figure: Figure) -> None:
        figure.set_size_inches(WIDTH_IN, 2.9 * len(shown))
        styles = drawing.arm_styles([arm.name for arm in view.plan.arms])
        for name, (left, right) in zip(shown, figure.subplots(len(shown), 2, squeeze=False), strict=True):
            _paint_curves(left, right, curves[name], baseline, styles)
            _loss_frame(left, name)
            _loss_frame(right, "distance from the baseline")

    return drawing.draw("logged", "Logged curves", caption, paint)


Curve = dict[int, float]
MOST_DRAWN = 1e300
"""Loss at the edge of a picture: matplotlib computes with sums of the numbers that it draws."""


def _logged(receipt: Receipt) -> dict[str, Curve]:
    """Return the curves of the metrics that a program logged."""
    curves = receipt.program.curves if receipt.program else {}
    return {
        name: {step: min(max(value, -MOST_DRAWN), MOST_DRAWN) for step, value in curve}
        for name, curve in curves.items()
    }


def _curve(receipt: Receipt) -> Curve:
    steps = drawing.thin(receipt.steps, MOST_CURVE_POINTS)
    return {
        step.index: min(max(step.loss, -MOST_DRAWN), MOST_DRAWN)
        for step in steps
        if step.loss is not None and math.isfinite(step.loss)
    }


def _gather(curves: Sequence[Curve]) -> dict[int, list[float]]:
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, loss in curve.items():
            by_step.setdefault(step, []).append(loss)
    return dict(sorted(by_step.items()))


def _mean(curves: Sequence[Curve]) -> Curve:
    return {step: sum(values) / len(values) for step, values in _gather(curves).items()}


def _extremes(curves: Sequence[Curve]) -> dict[int, tuple[float, float]]:
    return {step: (min(values), max(values)) for step, values in _gather(curves).items()}


def _repeat_spread(curves: Sequence[Curve], seeds: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Return by step the smallest and largest distance of a baseline run from the mean of its seed's runs."""
    distances: list[Curve] = []
    for seed in set(seeds):
        same = [curve for curve, its in zip(curves, seeds, strict=True) if its == seed]
        mean = _mean(same)
        distances += [{step: loss - mean[step] for step, loss in curve.items()} for curve in same if len(same) > 1]
    return _extremes(distances)


def _paint_curves(
    left: Axes, right: Axes, curves: Mapping[str, Sequence[Curve]], baseline: str, styles: Mapping[str, ArmStyle]
) -> None:
    """Draw the mean curve of each arm over the baseline's range, and on the right its distance from the baseline."""
    _envelope(left, _extremes(curves[baseline]))
    base = _mean(curves[baseline])
    for arm, own in curves.items():
        mean = _mean(own)
        _line(left, mean, styles[arm])
        if arm != baseline:
            _line(right, {step: mean[step] - base[step] for step in mean if step in base}, styles[arm])
    right.axhline(0, color=SOFT, linewidth=0.8, zorder=1)
    left.legend(loc="upper right", handlelength=2.6)


def _envelope(axes: Axes, extremes: dict[int, tuple[float, float]]) -> None:
    if extremes:
        lows, highs = zip(*extremes.values(), strict=True)
        axes.fill_between(list(extremes), lows, highs, color=BAND, linewidth=0.8, zorder=0)


def _line(axes: Axes, curve: Curve, style: ArmStyle) -> None:
    axes.plot(
        list(curve),
        list(curve.values()),
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
        markevery=max(1, len(curve) // 6),
        markersize=4,
        linewidth=1.3,
        label=style.shown,
    )


def _loss_frame(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
