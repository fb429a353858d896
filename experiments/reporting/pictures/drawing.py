"""Matplotlib figures as inline SVG in the colours of the page's theme, and the style of each arm.

Figures are drawn in sentinel colours, one per role. Each sentinel then becomes `var(--role)`, so one picture works in
light, dark and print. `theme` defines the colours of the roles.
"""

import io
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ablate.experiments.analysis.verdicts import Comparison, Verdict
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures.theme import SHADES, theme_css
from ablate.experiments.reporting.verdict_layout import PrimaryRule
from ablate.experiments.reporting.view import AblationView

T = TypeVar("T")

SENTINELS: dict[str, str] = {role: f"#0102{i:02x}" for i, role in enumerate(SHADES, start=1)}
"""Colours to draw with; no picture contains them for another reason."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SENTINELS["soft"],
    "axes.labelcolor": SENTINELS["soft"],
    "axes.titlecolor": SENTINELS["ink"],
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": True,
    "grid.color": SENTINELS["grid"],
    "grid.linewidth": 0.6,
    "xtick.color": SENTINELS["soft"],
    "ytick.color": SENTINELS["soft"],
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.color": SENTINELS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": SENTINELS["ink"],
    "hatch.color": SENTINELS["paper"],
    "hatch.linewidth": 1.2,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

_MATPLOTLIB = threading.Lock()
"""rcParams and the warning filter are global, so only one picture is drawn at a time."""

MARKERS = {"o": 1.0, "s": 0.9, "D": 0.9, "^": 1.25, "v": 1.25, "P": 1.2, "X": 1.15, "*": 1.8, "h": 1.1}
"""Markers with the size factor that makes them as visible as a circle."""
LINES = ("-", "--", "-.", ":")
LONGEST_NAME = 26
_VARIANT_ROLES = [role for role in SHADES if role.startswith("arm-")][1:]


@dataclass(frozen=True, kw_only=True)
class ArmStyle:
    """Style of one arm in every picture; colour, marker and line each identify it."""

    shown: str
    """The arm's name, shortened if it is too long for a picture."""
    role: str
    """Of the page's theme."""
    marker: str
    grown: float
    """Size factor of the marker."""
    line: str

    @property
    def colour(self) -> str:
        """Sentinel to draw with."""
        return SENTINELS[self.role]


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """Return the style of every arm; the baseline, which comes first, is grey."""
    markers = list(MARKERS)
    return {
        arm: ArmStyle(
            shown=wording.shorten(arm, LONGEST_NAME),
            role="arm-0" if i == 0 else _VARIANT_ROLES[(i - 1) % len(_VARIANT_ROLES)],
            marker=(marker := markers[i % len(markers)]),
            grown=MARKERS[marker],
            line=LINES[i % len(LINES)],
        )
        for i, arm in enumerate(arms)
    }


def thin(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One finished figure."""

    name: str
    """Slug; the prefix of every id inside."""
    title: str
    caption: str
    """Content, reading help, and omissions."""
    svg: str
    """Inline SVG in the colours of the page."""

    def standalone(self) -> str:
        """Return the picture as an SVG file with its own colours and background."""
        style = f"<style>{theme_css()} svg {{ background: var(--paper); }}</style>"
        head, _, body = self.svg.partition(">")
        return f'<?xml version="1.0" encoding="utf-8"?>\n{head} xmlns="http://www.w3.org/2000/svg">{style}{body}\n'


def draw(name: str, title: str, caption: str, paint: Callable[[Figure], None]) -> Picture:
    """Return the figure that `paint` draws as a picture; equal input gives equal bytes.

    Args:
        name: slug, unique in the page; prefixes every id.
        title: heading of the figure and accessible name of the SVG.
        caption: text below the figure and accessible description of the SVG.
        paint: draws into the figure in the colours of `SENTINELS` only, and sets its size.

    """
    with _MATPLOTLIB, matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names may be in any script
        figure = Figure(layout="constrained")
        paint(figure)
        out = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)  # its writer is untyped
        canvas.print_svg(out, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Picture(name=name, title=title, caption=caption, svg=_inline(out.getvalue(), name, title, caption))


def _inline(document: str, name: str, title: str, caption: str) -> str:
    """Strip the file header and comments, make ids unique, and replace sentinels by roles."""
    body = document[document.index("<svg") :].strip()
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = _own_ids(body, name).replace("xlink:href", "href")
    for role, sentinel in SENTINELS.items():
        body = body.replace(sentinel, f"var(--{role})")
    body = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--sans)", body)
    box = re.search(r'viewBox="([^"]*)"', body)
    if box is None:
        raise AssertionError("matplotlib wrote an SVG without a viewBox")
    opening = (
        f'<svg viewBox="{box[1]}" role="img" aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(caption)}</desc>'
    )
    return opening + body[body.index(">") + 1 :]


def _own_ids(body: str, name: str) -> str:
    """Prefix referenced ids with the picture's name, and drop the others."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    return re.sub(r'(href="|url\()#', rf"\1#{name}-", body)


INK, SOFT, BAND, PAPER = (SENTINELS[role] for role in ("ink", "soft", "band", "paper"))


def comparisons(verdict: Verdict | None) -> dict[str, Comparison]:
    """Return the comparison of every variant that has one."""
    variants = verdict.variants if verdict else ()
    return {variant.arm: variant.primary for variant in variants if variant.primary is not None}


def styles(view: AblationView) -> dict[str, ArmStyle]:
    """Return the style of every arm of `view`."""
    return arm_styles([arm.name for arm in view.plan.arms])


def rule_lines(axes: Axes, rule: PrimaryRule, *, vertical: bool) -> None:
    """Draw margin and zero, and if the lines are vertical also the adoption threshold."""
    span, line = (axes.axvspan, axes.axvline) if vertical else (axes.axhspan, axes.axhline)
    if rule.margin_pct:
        span(-rule.margin_pct, rule.margin_pct, color=BAND, linewidth=0, zorder=0)
    line(0, color=SOFT, linewidth=0.8, zorder=1)
    if rule.adopt_from_pct and vertical:
        line(rule.adopt_from_pct, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
