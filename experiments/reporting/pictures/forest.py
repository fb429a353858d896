"""Picture of the answer: every variant's effect with its interval, the margin band and the adoption line."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ablate.experiments.analysis.verdicts import Cause, Comparison, ExactComparison, VariantVerdict, Verdict
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures import drawing
from ablate.experiments.reporting.pictures.drawing import INK, PAPER, ArmStyle
from ablate.experiments.reporting.verdict_layout import (
    PrimaryRule,
    interval_heading,
    is_exact,
    lay_out,
    over_seeds,
)
from ablate.experiments.reporting.view import AblationView

NARROW_IN = 5.6
"""Narrow enough for a phone without scrolling."""
MOST_VARIANTS = 30
MARKER_PT = 7.0

_CRUSHED = 8.0
"""A variant that reaches so many times further than the typical one would leave no room to read the others."""

_MARKER = "Marker: mean over {}. Line: its {} interval. A thick part that lies within the margin proves sameness."
_EXACT_MARKER = "Marker: the value of one seed, the same in every repeat. There is no noise, so there is no interval."


def forest(view: AblationView) -> drawing.Picture | None:
    """Draw the effects of a view's verdict; None without one."""
    return None if view.verdict is None else effects(view.verdict)


def effects(verdict: Verdict) -> drawing.Picture | None:
    """Draw every variant's effect with its interval, the margin band and the adoption line; None without numbers."""
    if not any(map(_has_marker, verdict.variants)):
        return None
    answer, comparisons = lay_out(verdict), drawing.comparisons(verdict)
    if verdict.control is not None:
        comparisons[verdict.control.arm] = verdict.control.primary
    control = [] if verdict.control is None else [verdict.control.arm]
    arms = [verdict.baseline, *(one.arm for one in verdict.variants), *control]
    rule, styles = answer.rule, drawing.arm_styles(arms)
    exact = {variant.arm: variant.exact for variant in verdict.variants if variant.exact is not None}
    shown = [*(variant.arm for variant in answer.variants[:MOST_VARIANTS]), *control]
    left_out = max(0, len(answer.variants) - MOST_VARIANTS)
    reaches = {arm: _reach(comparisons.get(arm), exact.get(arm)) for arm in shown}
    beyond = _beyond(reaches, rule)

    def paint(figure: Figure) -> None:
        figure.set_size_inches(NARROW_IN, 0.85 + 0.3 * len(shown))
        axes = figure.add_subplot()
        drawing.rule_lines(axes, rule, vertical=True)
        for place, arm in enumerate(shown):
            if arm in comparisons:
                _forest_row(axes, place, comparisons[arm], styles[arm])
            if arm in exact:
                _exact_row(axes, place, exact[arm], styles[arm])
        if beyond:
            _cut(axes, [reach for arm, reach in reaches.items() if reach is not None and arm not in beyond], rule)
        for place, arm in enumerate(shown):
            if arm in beyond:
                _arrows(axes, place, reaches[arm] or (0.0, 0.0), styles[arm])
        _forest_frame(axes, shown, styles, wording.metric(rule.metric), is_cut=bool(beyond))

    return drawing.draw("forest", "Effect of every variant", _forest_caption(verdict, rule, left_out, beyond), paint)


_Reach = tuple[float, float]
"""The lowest and the highest value of a row, in percent."""


def _reach(effect: Comparison | None, exact: ExactComparison | None) -> _Reach | None:
    values = [pair.change_pct for pair in exact.seeds if pair.change_pct is not None] if exact is not None else []
    if effect is not None:
        values += [effect.ci_low_pct, effect.ci_high_pct, effect.tost_low_pct, effect.tost_high_pct, effect.delta_pct]
    return (min(values), max(values)) if values else None


def _beyond(reaches: Mapping[str, _Reach | None], rule: PrimaryRule) -> dict[str, _Reach]:
    """Return the variants that reach so far that the others could not be read on one scale with them."""
    rows = {arm: reach for arm, reach in reaches.items() if reach is not None}
    if not rows:
        return {}
    sizes = {arm: max(-low, high) for arm, (low, high) in rows.items()}
    typical = max(sorted(sizes.values())[(len(sizes) - 1) // 2], rule.margin_pct, abs(rule.adopt_from_pct or 0.0))
    outliers = {arm: rows[arm] for arm, size in sizes.items() if size > _CRUSHED * typical}
    return outliers if typical > 0 and len(outliers) < len(rows) else {}


def _cut(axes: Axes, kept: Sequence[_Reach], rule: PrimaryRule) -> None:
    """Set the scale to the rows that are kept and the lines of the rule."""
    adopt = rule.adopt_from_pct or 0.0
    low = min(0.0, -rule.margin_pct, adopt, *(low for low, _ in kept))
    high = max(0.0, rule.margin_pct, adopt, *(high for _, high in kept))
    room = 0.08 * (high - low)
    axes.set_xlim(low - room, high + room)


def _arrows(axes: Axes, place: int, reach: _Reach, style: ArmStyle) -> None:
    """Mark where a row leaves the scale."""
    low, high = axes.get_xlim()
    for edge, marker, leaves in ((low, "<", reach[0] < low), (high, ">", reach[1] > high)):
        if leaves:
            axes.plot(edge, place, marker, clip_on=False, zorder=4, **_marker(style))  # type: ignore[arg-type]


def _has_marker(variant: VariantVerdict) -> bool:
    return variant.primary is not None or (variant.exact is not None and bool(variant.exact.seeds))


def _forest_caption(verdict: Verdict, rule: PrimaryRule, left_out: int, beyond: Mapping[str, _Reach]) -> str:
    sentences = [
        f"Change of {wording.metric(rule.metric)} against {verdict.baseline}, in percent.",
        _EXACT_MARKER
        if is_exact(verdict)
        else _MARKER.format(
            "seeds" if over_seeds(verdict) else "blocks", interval_heading(verdict).removesuffix(" interval")
        ),
    ]
    if verdict.control is not None:
        sentences.append(f"{verdict.control.arm} repeats the baseline: its effect is noise.")
    if rule.margin_pct:
        sentences.append(f"Shaded: the practical margin of {wording.plain_percent(rule.margin_pct)} either way.")
    if rule.adopt_from_pct:
        sentences.append(f"Dashed: adopt from {wording.percent(rule.adopt_from_pct)}.")
    apart = [variant.arm for variant in verdict.variants if variant.cause is Cause.OTHER_WORK]
    if apart:
        sentences.append(f"Not comparable because of other work: {wording.listed(apart)}.")
    if beyond:
        far = [f"{arm} ({wording.percent(low)} to {wording.percent(high)})" for arm, (low, high) in beyond.items()]
        sentences.append(f"Arrows: beyond the scale, {wording.listed(far)}.")
    if left_out:
        sentences.append(wording.left_to_the_table(left_out))
    return " ".join(sentences)


def _forest_row(axes: Axes, place: int, effect: Comparison, style: ArmStyle) -> None:
    colour, rows = style.colour, [place, place]
    axes.plot([effect.ci_low_pct, effect.ci_high_pct], rows, color=colour, linewidth=1.3, zorder=2)
    axes.plot([effect.tost_low_pct, effect.tost_high_pct], rows, color=colour, linewidth=4.0, zorder=2)
    axes.plot(effect.delta_pct, place, style.marker, **_marker(style))  # type: ignore[arg-type]


def _exact_row(axes: Axes, place: int, exact: ExactComparison, style: ArmStyle) -> None:
    xs = [pair.change_pct for pair in exact.seeds if pair.change_pct is not None]
    axes.plot(xs, [place] * len(xs), style.marker, zorder=3, **_marker(style))  # type: ignore[arg-type]


def _marker(style: ArmStyle) -> dict[str, str | float]:
    size = MARKER_PT * style.grown
    return {"color": style.colour, "markersize": size, "markeredgecolor": PAPER, "markeredgewidth": 1}


def _forest_frame(axes: Axes, shown: Sequence[str], styles: dict[str, ArmStyle], metric: str, *, is_cut: bool) -> None:
    places = range(len(shown))
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks(places, [styles[arm].shown for arm in shown])
    if not is_cut:
        axes.margins(x=0.08)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlabel(f"change of {metric} against the baseline, %")
    axes.xaxis.set_major_formatter(lambda value, _: wording.signed(value))
