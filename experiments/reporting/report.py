"""One self-contained HTML page for an ablation: the answer first; no script, nothing external."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.analysis.arm_summary import measured_trials
from experiments.reporting import drawing, evidence_tables, pictures, wording
from experiments.reporting.compilation_table import compilation_table
from experiments.reporting.table import Table
from experiments.reporting.view import AblationView

TEMPLATES = Path(__file__).parent / "templates"


def render(view: AblationView) -> str:
    """Render the report of `view`; equal views give equal pages, in every state of the ablation."""
    return (
        _environment()
        .get_template("report.html")
        .render(
            view=view,
            answer=view.answer,
            glance=_glance(view),
            pictures=pictures.draw_all(view),
            detail_tables=_filled(
                evidence_tables.arms_table(view),
                evidence_tables.unmeasured_table(view),
                evidence_tables.gates_table(view),
                compilation_table(view),
                evidence_tables.kernels_table(view),
                evidence_tables.blocks_table(view),
            ),
            provenance=evidence_tables.provenance_table(view),
            rule=evidence_tables.rule_table(view.verdict.rule) if view.verdict else None,
            receipts=evidence_tables.receipts_table(view),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["theme_css"] = Markup(drawing.theme_css())  # noqa: S704  # made from our own table
    return environment


def _glance(view: AblationView) -> tuple[tuple[str, str], ...]:
    """Return the facts that stand beside the question: (label, value)."""
    counted = view.verdict.blocks_counted if view.verdict else len(view.whole_blocks.blocks)
    calibrated = "unknown until the verdict" if view.verdict is None else "yes" if view.verdict.calibrated else "no"
    return (
        ("State", view.state),
        ("Node class", f"{view.plan.node_class}, {wording.counted(view.plan.devices, 'device')}"),
        ("Blocks counted" if view.verdict else "Blocks with receipts", f"{counted} of {len(view.plan.blocks)}"),
        ("Trials measured", f"{len(measured_trials(view.receipts)):,} of {len(view.trials):,}"),
        ("Calibrated", calibrated),
        ("Submitted", wording.moment(view.created_at)),
    )


def _filled(*tables: Table) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)
