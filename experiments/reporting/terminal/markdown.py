"""Verdicts as Markdown: the table for MLflow's note, and the comment of a pull request."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.block_numbers import block_list
from ablate.experiments.outcomes import DECLARED, Required
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.sentences import origin_problems, seeds
from ablate.experiments.reporting.table import Table
from ablate.experiments.reporting.verdict_layout import (
    VariantLayout,
    VerdictLayout,
    by_importance,
    lay_out,
    uncalibrated,
)

MAX_CHARS = 65_500
"""The longest comment that GitHub accepts has 36 more, for our mark; a check run takes 35 more."""
_MAX_LINE = 1000
_NEVER_SHORTENED = ("|", "**Required")
"""Starts of lines that are never shortened: rows of tables, which are short, and the requirement."""
_LEFT_OUT = ("memory", "loss", "repeats")
"""Columns that a short table lacks."""
_ALIGNMENT = {"text": "---", "code": "---", "number": "--:"}


def verdict_markdown(verdict: Verdict) -> str:
    """Return the verdict as a Markdown table, one row for each variant, followed by the reasons and the rule."""
    layout = lay_out(verdict)
    rule = layout.rule
    heading = "; ".join(part for part in (layout.heading, layout.caveat) if part)
    reasons = [f"- `{v.arm}`: {_escaped(_reason(v))}{_gates(v)}" for v in layout.variants]
    decided_by = f"By {wording.metric(rule.metric)}: margin {wording.plain_percent(rule.margin_pct)}, adopt from "
    lines = [
        f"**{_escaped(verdict.ablation)}**: {_escaped(heading)}",
        "",
        *([_escaped(layout.lead), ""] if layout.has_finding else []),
        *(text for line in layout.outlook for text in (_escaped(line), "")),
        *_markdown_table(layout.answers),
        "",
        *reasons,
        "",
        f"{decided_by}{wording.percent(rule.adopt_from_pct)}.",
        f"Rule `{verdict.rule_digest}`.",
    ]
    return "\n".join(lines)


def _gates(variant: VariantLayout) -> str:
    return "" if variant.gates_live.text == DECLARED else f" Gates live: {variant.gates_live}."


def short_table(verdict: Verdict, layout: VerdictLayout, most: int) -> str:
    """Return the answers in few columns, the `most` important variants."""
    table = layout.answers
    by_arm = {variant.arm: line for variant, line in zip(layout.variants, table.rows, strict=False)}
    kept = [place for place, column in enumerate(table.columns) if column.heading not in _LEFT_OUT]
    first = by_importance(verdict, layout)[:most]
    rows = tuple(tuple(by_arm[one.arm][place] for place in kept) for one in first)
    short = Table(title="", columns=tuple(table.columns[place] for place in kept), rows=rows)
    return "\n".join(_markdown_table(short))


def _reason(variant: VariantLayout) -> str:
    return f"{variant.sentence} {variant.why}." if variant.why else variant.sentence


def table_markdown(table: Table) -> str:
    """Return a table with its title and its note."""
    return "\n".join([f"## {_escaped(table.title)}", "", *_markdown_table(table), "", _escaped(table.note), ""])


def _markdown_table(table: Table) -> list[str]:
    headings = [_escaped(column.heading) for column in table.columns]
    alignment = [_ALIGNMENT[column.kind] for column in table.columns]
    rows = [[f"`{_escaped(str(first))}`", *(_escaped(str(cell)) for cell in others)] for first, *others in table.rows]
    return [f"| {' | '.join(line)} |" for line in (headings, alignment, *rows)]


def _escaped(text: str) -> str:
    """Return untrusted text in a form that cannot break the Markdown."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question behind a verdict, for a pull request."""

    question: str
    commits: Mapping[str, str]
    """The whole name of the commit of each arm whose code is one."""
    links: Mapping[str, str]
    """Addresses by what they show."""


def pull_request_markdown(verdict: Verdict, require: Required | None = None, asked: Asked | None = None) -> str:
    """Return a comment short enough for GitHub. It begins with what is required, if anything, and the question."""
    table = verdict_markdown(verdict).split("\n")
    head = [*_requirement(verdict, require), *(() if asked is None else _question(verdict, asked))]
    return _shorten([*head, *table, "", *_evidence(verdict)], verdict.ablation)


def _question(verdict: Verdict, asked: Asked) -> Iterator[str]:
    yield _escaped(asked.question)
    yield ""
    if asked.commits:
        named = ", ".join(f"`{arm}` is commit {commit[:12]}" for arm, commit in asked.commits.items())
        yield f"Measured: {named}; by {wording.metric(lay_out(verdict).rule.metric)}."
        yield ""
    if asked.links:
        yield ", ".join(f"[{name}]({address})" for name, address in asked.links.items())
        yield ""


def _shorten(lines: Sequence[str], ablation: str) -> str:
    """Join lines into a comment. Shortens long lines, and replaces the lines that do not fit by a command."""
    lines = [line if line.startswith(_NEVER_SHORTENED) else wording.shorten(line, _MAX_LINE) for line in lines]
    ends = list(accumulate(len(line) + 1 for line in lines))
    if ends[-1] <= MAX_CHARS:
        return "\n".join(lines)
    rest = f"\n- the rest does not fit here: `ablate verdict {ablation} --explain`"
    fitting = bisect_right(ends, MAX_CHARS - len(rest))
    return "\n".join(lines[:fitting]) + rest


def _requirement(verdict: Verdict, require: Required | None) -> Iterator[str]:
    if require is None:
        return
    others = [f"`{one.arm}` is {one.shortfall(require)}" for one in verdict.variants if not one.meets(require)]
    met = f"not met: {', '.join(others)}" if others else "met"
    yield f"**Required of every variant: {require}. {met[0].upper()}{met[1:]}.**"
    yield ""


def _evidence(verdict: Verdict) -> Iterator[str]:
    circumstances = verdict.circumstances
    yield (
        f"- {wording.share(verdict.blocks_counted, verdict.blocks_planned)} blocks on {verdict.node_class} counted; "
        + (
            wording.counted(len(circumstances.attempts), "broken attempt")
            if circumstances.attempts
            else "no broken attempt"
        )
    )
    for signer in circumstances.signers:
        who = "unsigned" if signer.key is None else f"signed by `{signer.key}`"
        yield f"- blocks {block_list(signer.blocks)} ran on `{signer.name}`; {who}"
    if own := seeds(verdict):
        yield f"- {own}"
    for problem in origin_problems(verdict):
        yield f"- {problem[0].lower()}{problem[1:]}"
    if reason := uncalibrated(verdict):
        yield f"- uncalibrated: {reason}"
    if circumstances.family.earlier:
        earlier = ", ".join(f"`{one.name}` ({one.state})" for one in circumstances.family.earlier)
        yield f"- asking {circumstances.family.number} of this question; earlier: {earlier}"
