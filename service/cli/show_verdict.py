"""Verdicts of the CLI as people read them."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape

from experiments.analysis.verdicts import Verdict
from experiments.reporting.sentences import broken_attempts
from experiments.reporting.table import Cell, Tone
from experiments.reporting.table import Table as LaidOutTable
from experiments.reporting.terminal.terminal_table import Kind, TerminalColumn, TerminalTable, names, texts
from experiments.reporting.verdict_layout import lay_out
from service.cli.show import facts

if TYPE_CHECKING:
    from experiments.analysis.published import PublishedTable, PublishedVerdict

COLOURS: dict[Tone, str] = {
    Tone.GOOD: "green",
    Tone.BAD: "red",
    Tone.NEUTRAL: "cyan",
    Tone.OPEN: "yellow",
    Tone.BROKEN: "magenta",
}
_KINDS: dict[str, Kind] = {"text": "text", "code": "name", "number": "number"}
_LEAVING = ("loss", "memory", "MDE", "repeats", "of the variant", "of the baseline")
"""Columns of a verdict without which its row still says the answer."""


def verdict(found: Verdict) -> RenderableType:
    """Show the verdict table: one row per variant."""
    layout = lay_out(found)
    return _table(layout.answers, title="; ".join(part for part in (layout.heading, layout.caveat) if part))


def published(printed: "PublishedTable", found: "PublishedVerdict") -> RenderableType:
    """Show what a printed table claims, and what it shows."""
    known = facts(
        ("table", f"[bold]{escape(printed.title)}[/], {escape(printed.source)}"),
        ("claim", escape(printed.claim)),
        ("word", f"[bold]{found.word}[/], decision {found.decision}"),
        ("reason", escape(found.reason)),
    )
    made = TerminalTable(*names("requirement"), *texts("rule", "result", "found"))
    for result in found.requirements:
        passed = "[green]passed[/]" if result.passed else "[red]FAILED[/]"
        made.add_row(result.metric, result.rule, passed, escape(result.detail))
    return Group(known, made)


def explanation(found: Verdict) -> list[str]:
    """Return the reasoning of every variant as lines of rich markup."""
    lines: list[str] = []
    for variant in lay_out(found).variants:
        lines += [f"[bold]{escape(variant.arm)}[/]: {escape(variant.sentence)}"]
        lines += [f"  {escape(variant.why)}"] if variant.why else []
        for metric, rule, result, detail in variant.requirements:
            lines.append(f"  {_markup(result)}  {_markup(metric)} {_markup(rule)}: {_markup(detail)}")
        lines += [
            f"  gates live {variant.gates_live} (every gate in every trial)",
            *(f"  {escape(remark)}" for remark in variant.remarks),
        ]
    broken = [escape(line) for line in broken_attempts(found)]
    return [*lines, *broken, f"[dim]rule {found.rule_digest}[/]"]


def _table(laid_out: LaidOutTable, *, title: str) -> TerminalTable:
    first, *others = laid_out.columns
    columns = [*names(first.heading), *(TerminalColumn(other.heading, _KINDS[other.kind]) for other in others)]
    made = TerminalTable(*columns, title=escape(title), leaving=_LEAVING)
    for row in laid_out.rows:
        made.add_row(*map(_markup, row))
    return made


def _markup(cell: Cell) -> str:
    said = escape(f"{cell.sign} {cell.text}" if cell.sign else cell.text)
    note = f" ({escape(cell.note)})" if cell.note else ""
    return f"[{COLOURS[cell.tone]}]{said}[/]{note}" if cell.tone else f"{said}{note}"
