"""A verdict as Markdown: MLflow's note, and whatever else shows Markdown."""

from experiments.analysis.verdicts import Verdict
from experiments.reporting import wording
from experiments.reporting.table import Cell, Table
from experiments.reporting.verdict_layout import VariantLayout, lay_out

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
        *_table(layout.answers),
        "",
        *reasons,
        "",
        f"{decided}{wording.percent(rule.adopt_from_pct)}.",
        f"Rule `{verdict.rule_digest}`.",
    ]
    return "\n".join(lines)


def _said(variant: VariantLayout) -> str:
    return f"{variant.sentence} {variant.why}." if variant.why else variant.sentence


def _table(table: Table) -> list[str]:
    headings = [_escaped(column.heading) for column in table.columns]
    alignment = [_ALIGNMENT[column.kind] for column in table.columns]
    cells = [[_first(own[0]), *(_escaped(str(cell)) for cell in own[1:])] for own in table.rows]
    return [f"| {' | '.join(line)} |" for line in (headings, alignment, *cells)]


def _first(cell: Cell) -> str:
    return f"`{_escaped(str(cell))}`"


def _escaped(text: str) -> str:
    """Keep text that came from outside from breaking the Markdown."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
