"""Verdicts for a terminal: the table, the reasons, and judged tables of other people."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.outcomes import DECLARED
from ablate.experiments.reporting.sentences import broken_attempts, origin_problems, registration, seeds, signers
from ablate.experiments.reporting.table import Cell, Tone
from ablate.experiments.reporting.table import Table as LaidOutTable
from ablate.experiments.reporting.terminal.terminal_table import Kind, TerminalColumn, TerminalTable, names, texts
from ablate.experiments.reporting.verdict_cells import requirement
from ablate.experiments.reporting.verdict_layout import lay_out
from ablate.service.cli.tables import facts

if TYPE_CHECKING:
    from ablate.experiments.analysis.published import PublishedTable, PublishedVerdict

_COLOURS: dict[Tone, str] = {
    Tone.GOOD: "green",
    Tone.BAD: "red",
    Tone.NEUTRAL: "cyan",
    Tone.OPEN: "yellow",
    Tone.BROKEN: "magenta",
}
_KINDS: dict[str, Kind] = {"text": "text", "code": "name", "number": "number"}
_PICTURE_WIDTH = 60
_LEAVING = ("loss", "memory", "repeats", "of the variant", "of the baseline")
"""Columns that a narrow terminal moves below the row."""


def verdict(verdict: Verdict) -> RenderableType:
    """Return the verdict table, one row for each variant, and the origin of its numbers."""
    layout = lay_out(verdict)
    table = _table(layout.answers, title="; ".join(part for part in (layout.heading, layout.caveat) if part))
    problems = (f"[yellow]{escape(problem)}[/]" for problem in origin_problems(verdict))
    lines = filter(None, [*signers(verdict), registration(verdict), seeds(verdict)])
    lead = [f"[bold]{escape(layout.lead)}[/]"] if layout.has_finding else []
    first = (*lead, *(f"[yellow]{escape(line)}[/]" for line in layout.outlook))
    return Group(*first, table, *(f"[dim]{escape(line)}[/]" for line in lines), *problems)


def between(verdict: Verdict) -> list[RenderableType]:
    """Return the table of the variants against each other, with its note; nothing for a single variant."""
    from ablate.experiments.reporting.between import between_variants  # imports scipy, which other answers do not need

    table = between_variants(verdict)
    return [Group(_table(table, title=table.title), f"[dim]{escape(table.note)}[/]")] if table.rows else []


def picture(verdict: Verdict) -> list[str]:
    """Return the effect of each variant with its interval as a line of text, all on one scale with a bar at zero."""
    by_arm = {one.arm: one.primary for one in verdict.variants}
    compared = {one.arm: own for one in lay_out(verdict).variants if (own := by_arm[one.arm]) is not None}
    ends = [0.0, *(end for own in compared.values() for end in (own.ci_low_pct, own.ci_high_pct, own.delta_pct))]
    low, size = min(ends), max(ends) - min(ends) or 1.0
    names = max(map(len, compared), default=0)

    def place(value: float) -> int:
        return round((_PICTURE_WIDTH - 1) * (value - low) / size)

    lines = []
    for arm, own in compared.items():
        first, last = place(own.ci_low_pct), place(own.ci_high_pct)
        marks = {place(0.0): "│", **dict.fromkeys(range(first, last + 1), "─"), place(own.delta_pct): "●"}
        lines.append(f"{arm:<{names}}  {''.join(marks.get(one, ' ') for one in range(_PICTURE_WIDTH))}".rstrip())
    return lines


def kernels(verdict: Verdict) -> list[RenderableType]:
    """Return the kernels of each variant with a profiled step against the baseline's, with a note below each table."""
    return [Group(_table(one, title=one.title), f"[dim]{escape(one.note)}[/]") for one in lay_out(verdict).kernels]


def reasons(verdict: Verdict) -> list[RenderableType]:
    """Return variants against each other, kernels, and the reasons for every verdict."""
    return [*between(verdict), *kernels(verdict), *explanation(verdict)]


def published(table: "PublishedTable", verdict: "PublishedVerdict") -> RenderableType:
    """Return the claim of a published table and the verdict that the table supports."""
    pairs = facts(
        ("table", f"[bold]{escape(table.title)}[/], {escape(table.source)}"),
        ("claim", escape(table.claim)),
        ("verdict", f"[bold]{verdict.word}[/], decision {verdict.decision}"),
        ("reason", escape(verdict.reason)),
    )
    requirements = TerminalTable(*names("requirement"), *texts("rule", "result", "numbers"))
    for result in verdict.requirements:
        metric, rule, cell, detail = requirement(result)
        requirements.add_row(metric.text, rule.text, _markup(cell), escape(detail.text))
    return Group(pairs, requirements)


def explanation(verdict: Verdict) -> list[str]:
    """Return the reasons for every variant's verdict as lines of rich markup."""
    lines: list[str] = []
    for variant in lay_out(verdict).variants:
        lines += [f"[bold]{escape(variant.arm)}[/]: {escape(variant.sentence)}"]
        lines += [f"  {escape(variant.why)}"] if variant.why else []
        for metric, rule, result, detail in variant.requirements:
            lines.append(f"  {_markup(result)}  {_markup(metric)} {_markup(rule)}: {_markup(detail)}")
        lines += [] if variant.gates_live.text == DECLARED else [f"  gates live {variant.gates_live}"]
        lines += [f"  {escape(remark)}" for remark in variant.remarks]
    broken = [escape(line) for line in broken_attempts(verdict)]
    return [*lines, *broken, f"[dim]rule {verdict.rule_digest}[/]"]


def _table(layout: LaidOutTable, *, title: str) -> TerminalTable:
    first, *others = layout.columns
    columns = [*names(first.heading), *(TerminalColumn(other.heading, _KINDS[other.kind]) for other in others)]
    table = TerminalTable(*columns, title=escape(title), leaving=_LEAVING)
    for row in layout.rows:
        table.add_row(*map(_markup, row))
    return table


def _markup(cell: Cell) -> str:
    text = escape(f"{cell.sign} {cell.text}" if cell.sign else cell.text)
    note = f" ({escape(cell.note)})" if cell.note else ""
    return f"[{_COLOURS[cell.tone]}]{text}[/]{note}" if cell.tone else f"{text}{note}"
