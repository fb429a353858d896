"""What the pictures of the answer have in common: arm styles, the verdict's comparisons, margin and adoption line."""

from matplotlib.axes import Axes

from experiments.analysis.verdicts import Comparison, Verdict
from experiments.reporting.pictures import drawing
from experiments.reporting.pictures.drawing import ArmStyle
from experiments.reporting.verdict_layout import PrimaryRule
from experiments.reporting.view import AblationView

INK, SOFT, BAND, PAPER = (drawing.SENTINELS[role] for role in ("ink", "soft", "band", "paper"))


def comparisons(verdict: Verdict | None) -> dict[str, Comparison]:
    """Return every variant's comparison by statistics; those without one are left out."""
    variants = verdict.variants if verdict else ()
    return {variant.arm: variant.primary for variant in variants if variant.primary is not None}


def styles(view: AblationView) -> dict[str, ArmStyle]:
    """Return how every arm is drawn."""
    return drawing.arm_styles([arm.name for arm in view.plan.arms])


def rule_lines(axes: Axes, rule: PrimaryRule, *, vertical: bool) -> None:
    """Draw margin and zero, and where effects run to the right the line from which the rule adopts."""
    span, line = (axes.axvspan, axes.axvline) if vertical else (axes.axhspan, axes.axhline)
    if rule.margin_pct:
        span(-rule.margin_pct, rule.margin_pct, color=BAND, linewidth=0, zorder=0)
    line(0, color=SOFT, linewidth=0.8, zorder=1)
    if rule.adopt_from_pct and vertical:
        line(rule.adopt_from_pct, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
