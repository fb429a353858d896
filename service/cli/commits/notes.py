"""Messages about a confirmed loss, by apprise: what, how much, since when, a picture, and a link.

They go out from the machine of the command, to receivers that its user names.
"""

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pictures.theme import SHADES
from ablate.experiments.system.http_clients import apply_proxy_rule
from ablate.experiments.system.setting_values import is_loopback
from ablate.service.cli.commits.nights import NightChange

if TYPE_CHECKING:
    from apprise import NotifyBase


@dataclass(frozen=True, kw_only=True)
class Note:
    """A message."""

    title: str
    text: str
    picture: bytes
    """As PNG."""


def receiver(url: str) -> "NotifyBase":
    """Return the receiver of an address as apprise writes it. Raises SpecError, which does not show the address."""
    try:
        import apprise
    except ImportError as error:
        raise SpecError([_problem("apprise is not installed", "pip install 'ablate[service]'")]) from error
    made = apprise.Apprise.instantiate(url, suppress_exceptions=True)
    if made is None:
        detail = f"apprise knows no receiver of the form {url.partition('://')[0]}://..."
        raise SpecError([_problem(detail, "for example slack://TOKEN, mailtos://USER:PASSWORD@HOST?to=ADDRESS")])
    return made


def send(note: Note, to: "NotifyBase") -> str | None:
    """Send a message once; return why it failed, None if it was accepted."""
    import apprise

    own = f"http://{to.host or ''}"
    if is_loopback(own):
        apply_proxy_rule(own)
    warnings = apprise.LogCapture(level=logging.WARNING)  # type: ignore[no-untyped-call]
    with TemporaryDirectory(prefix="ablate-note-") as place, warnings as log:
        picture = Path(place, "effect.png")
        picture.write_bytes(note.picture)
        sender = apprise.Apprise()
        sender.add(to)
        accepted = sender.notify(note.text, note.title, notify_type="warning", body_format="text", attach=str(picture))
        return None if accepted else wording.shorten(" ".join(log.getvalue().split()) or "it was not accepted", 300)


def shown(to: "NotifyBase") -> str:
    """Return the address of a receiver without its secrets."""
    return str(to.url(privacy=True)).partition("?")[0]  # type: ignore[no-untyped-call]


def picture_of(changes: Sequence[tuple[str, NightChange]], title: str) -> bytes:
    """Draw the changes of commits, oldest first, as PNG; the last one stands out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(0, color=SHADES["soft"].light, linewidth=0.8)
    for place, (_name, one) in enumerate(changes):
        is_last = place == len(changes) - 1
        colour = SHADES["limit" if is_last else "arm-1"].light
        axes.plot([place, place], [one.low_pct, one.high_pct], color=colour, linewidth=1.3)
        axes.plot(place, one.change_pct, "o", color=colour, markersize=6 if is_last else 4)
    step = max(1, len(changes) // 12)
    names = [name for name, _change in changes]
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=45, ha="right", fontsize=7)
    axes.set_ylabel("change, %", fontsize=8)
    axes.set_title(title, loc="left", fontsize=9, parse_math=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _problem(detail: str, hint: str) -> SpecProblem:
    return SpecProblem(pointer="--notify", detail=detail, hint=hint)
