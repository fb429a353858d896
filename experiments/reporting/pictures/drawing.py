"""How pictures are drawn: each arm's looks, and matplotlib figures as inline SVG in the colours of the page's theme.

Figures are drawn with sentinel colours, one for each role; every sentinel becomes `var(--role)`, so one picture follows
light, dark and print. The values of all roles, and the style sheet that sets them, come from one table, in `theme`.
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

from experiments.analysis.verdicts import Comparison, Verdict
from experiments.reporting import wording
from experiments.reporting.pictures.theme import SHADES, theme_css
from experiments.reporting.verdict_layout import PrimaryRule
from experiments.reporting.view import AblationView

T = TypeVar("T")


SENTINELS: dict[str, str] = {role: f"#0102{i:02x}" for i, role in enumerate(SHADES, start=1)}
"""Colours to draw with: they occur in no picture for any other reason."""

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
"""rcParams and the warning filter belong to the whole process: one picture at a time."""


MARKERS = {"o": 1.0, "s": 0.9, "D": 0.9, "^": 1.25, "v": 1.25, "P": 1.2, "X": 1.15, "*": 1.8, "h": 1.1}
"""Each with the factor of its size that lets as much of it be seen as of a circle: a star is mostly its own edge."""
LINES = ("-", "--", "-.", ":")
LONGEST_NAME = 26
_VARIANT_ROLES = [role for role in SHADES if role.startswith("arm-")][1:]


@dataclass(frozen=True, kw_only=True)
class ArmStyle:
    """How one arm looks in every picture: colour, marker and line tell it apart, each on its own."""

    shown: str
    """The arm's name, shortened where it is too long for a picture."""
    colour: str
    """Sentinel to draw with."""
    marker: str
    grown: float
    """Factor of its marker's size."""
    line: str


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """Give every arm its looks, the baseline, which comes first, in grey."""
    markers = list(MARKERS)
    return {
        arm: ArmStyle(
            shown=wording.shorten(arm, LONGEST_NAME),
            colour=SENTINELS["arm-0" if i == 0 else _VARIANT_ROLES[(i - 1) % len(_VARIANT_ROLES)]],
            marker=(marker := markers[i % len(markers)]),
            grown=MARKERS[marker],
            line=LINES[i % len(LINES)],
        )
        for i, arm in enumerate(arms)
    }


def thin(items: Sequence[T], most: int) -> Sequence[T]:
    """Keep at most `most` items, evenly spread, the first and the last among them."""
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
    """What is drawn, how to read it, and what was left out."""
    svg: str
    """Inline SVG that takes its colours from the page."""

    def standalone(self) -> str:
        """Return the picture as an SVG file that carries its own colours and paper."""
        style = f"<style>{theme_css()} svg {{ background: var(--paper); }}</style>"
        head, _, body = self.svg.partition(">")
        return f'<?xml version="1.0" encoding="utf-8"?>\n{head} xmlns="http://www.w3.org/2000/svg">{style}{body}\n'


def draw(name: str, title: str, caption: str, paint: Callable[[Figure], None]) -> Picture:
    """Let `paint` fill a figure and return it as a picture; equal input gives equal bytes.

    Args:
        name: slug, unique in the page; prefixes every id.
        title: heading of the figure and accessible name of the SVG.
        caption: text below the figure and accessible description of the SVG.
        paint: draws into the figure, with `SENTINELS` as its only colours, and sets its size.

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
    """Strip what only a file needs, make ids unique, and put roles in the place of sentinels."""
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
    """Prefix every id that is referred to with the picture's name, and drop the others."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", body)
    return re.sub(r'(href="|url\()#', rf"\1#{name}-", body)


INK, SOFT, BAND, PAPER = (SENTINELS[role] for role in ("ink", "soft", "band", "paper"))


def comparisons(verdict: Verdict | None) -> dict[str, Comparison]:
    """Return every variant's comparison by statistics; those without one are left out."""
    variants = verdict.variants if verdict else ()
    return {variant.arm: variant.primary for variant in variants if variant.primary is not None}


def styles(view: AblationView) -> dict[str, ArmStyle]:
    """Return how every arm is drawn."""
    return arm_styles([arm.name for arm in view.plan.arms])


def rule_lines(axes: Axes, rule: PrimaryRule, *, vertical: bool) -> None:
    """Draw margin and zero, and where effects run to the right the line from which the rule adopts."""
    span, line = (axes.axvspan, axes.axvline) if vertical else (axes.axhspan, axes.axhline)
    if rule.margin_pct:
        span(-rule.margin_pct, rule.margin_pct, color=BAND, linewidth=0, zorder=0)
    line(0, color=SOFT, linewidth=0.8, zorder=1)
    if rule.adopt_from_pct and vertical:
        line(rule.adopt_from_pct, color=INK, linewidth=0.9, linestyle=(0, (5, 3)), zorder=1)
