"""A verdict as the comment of a pull request: what was asked of it, the table, and what stands behind it."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from experiments.analysis.verdicts import Verdict
from experiments.block_numbers import block_list
from experiments.outcomes import Decision
from experiments.reporting import wording
from experiments.reporting.table import Cell, Table
from experiments.reporting.verdict_layout import VariantLayout, lay_out, words_capped

_ALIGNMENT = {"text": "---", "code": "---", "number": "--:"}


def verdict_markdown(verdict: Verdict) -> str:
    """Return the verdict as a Markdown table, one row for each variant, with the reasons and the rule under it."""
    layout = lay_out(verdict)
    rule = layout.rule
    heading = "; ".join(part for part in (layout.heading, layout.caveat) if part)
    reasons = [f"- `{v.arm}`: {_escaped(_said(v))} Gates live: {v.gates_live}." for v in layout.variants]
    decided = f"By {wording.metric(rule.metric)}: margin {wording.plain_percent(rule.margin_pct)}, adopt from "
    lines = [
        f"**{_escaped(verdict.ablation)}**: {_escaped(heading)}",
        "",
        *_markdown_table(layout.answers),
        "",
        *reasons,
        "",
        f"{decided}{wording.percent(rule.adopt_from_pct)}.",
        f"Rule `{verdict.rule_digest}`.",
    ]
    return "\n".join(lines)


def _said(variant: VariantLayout) -> str:
    return f"{variant.sentence} {variant.why}." if variant.why else variant.sentence


def _markdown_table(table: Table) -> list[str]:
    headings = [_escaped(column.heading) for column in table.columns]
    alignment = [_ALIGNMENT[column.kind] for column in table.columns]
    cells = [[_first(own[0]), *(_escaped(str(cell)) for cell in own[1:])] for own in table.rows]
    return [f"| {' | '.join(line)} |" for line in (headings, alignment, *cells)]


def _first(cell: Cell) -> str:
    return f"`{_escaped(str(cell))}`"


def _escaped(text: str) -> str:
    """Keep text that came from outside from breaking the Markdown."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


MAX_CHARS = 65_536
"""The longest comment that GitHub takes."""
_LONGEST_LINE = 1000
_WHOLE = ("|", "**Required")
"""Lines that are never shortened: rows of tables, which have few characters, and what was required."""


def pull_request_markdown(verdict: Verdict, require: Decision | None = None) -> str:
    """Return Markdown that says first whether every variant has the decision that is required, short enough to post."""
    table = verdict_markdown(verdict).split("\n")
    return _fitting([*_requirement(verdict, require), *table, "", *_evidence(verdict)], verdict.ablation)


def _fitting(lines: Sequence[str], ablation: str) -> str:
    """Join lines into a comment; what is too long ends in an ellipsis, and what finds no room is left to a command."""
    lines = [line if line.startswith(_WHOLE) else wording.shorten(line, _LONGEST_LINE) for line in lines]
    ends = list(accumulate(len(line) + 1 for line in lines))
    if ends[-1] <= MAX_CHARS:
        return "\n".join(lines)
    rest = f"\n- the rest has no room here: `ablate verdict {ablation} --explain`"
    fitting = bisect_right(ends, MAX_CHARS - len(rest))
    return "\n".join(lines[:fitting]) + rest


def _requirement(verdict: Verdict, require: Decision | None) -> Iterator[str]:
    if require is None:
        return
    others = [f"`{one.arm}` is {one.decision}" for one in verdict.variants if one.decision is not require]
    met = f"not met: {', '.join(others)}" if others else "met"
    yield f"**Required of every variant: {require}. {met[0].upper()}{met[1:]}.**"
    yield ""


def _evidence(verdict: Verdict) -> Iterator[str]:
    known = verdict.circumstances
    yield (
        f"- {wording.share(verdict.blocks_counted, verdict.blocks_planned)} blocks on {verdict.node_class} counted; "
        + (f"{wording.counted(len(known.attempts), 'attempt')} broke" if known.attempts else "no attempt broke")
    )
    for signer in known.signers:
        who = "nobody signed them" if signer.key is None else f"signed by `{signer.key}`"
        yield f"- blocks {block_list(signer.blocks)} ran on `{signer.name}`; {who}"
    if refused := words_capped(verdict):
        yield f"- words are capped: {refused}"
    if known.family.earlier:
        yield f"- asking {known.family.number} of this question; before: {_earlier(verdict)}"


def _earlier(verdict: Verdict) -> str:
    return ", ".join(f"`{one.name}` ({one.state})" for one in verdict.circumstances.family.earlier)
