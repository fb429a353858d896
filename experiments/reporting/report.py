"""One self-contained HTML page for an ablation: the answer first; no script, nothing external."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.reporting import answer, pictures, report_tables, series, svg, wording
from experiments.reporting.report_tables import Table
from experiments.reporting.view import AblationView

TEMPLATES = Path(__file__).parent / "templates"


def render(view: AblationView) -> str:
    """Render the report of `view`; equal views give equal pages, in every state of the ablation."""
    return (
        _environment()
        .get_template("report.html")
        .render(
            view=view,
            lead=answer.lead(view),
            waiting=answer.waiting(view),
            answers=answer.answers(view.verdict) if view.verdict else (),
            glance=_glance(view),
            verdict_tables=_verdict_tables(view),
            pictures=pictures.draw_all(view),
            detail_tables=_filled(
                report_tables.arms_table(view),
                report_tables.unmeasured_table(view),
                report_tables.gates_table(view),
                report_tables.kernels_table(view),
                report_tables.blocks_table(view),
            ),
            provenance=report_tables.provenance_table(view),
            rule=report_tables.rule_table(view.verdict.rule) if view.verdict else None,
            receipts=report_tables.receipts_table(view),
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
    environment.globals["theme_css"] = Markup(svg.theme_css())  # noqa: S704  # made from our own table
    return environment


def _glance(view: AblationView) -> tuple[tuple[str, str], ...]:
    """Return the facts that stand beside the question: (label, value)."""
    receipts = series.receipts_in_time(view)
    done = {trial.block_index for trial in view.trials if trial.receipt is not None}
    counted = view.verdict.blocks_counted if view.verdict else len(done)
    calibrated = "unknown until the verdict" if view.verdict is None else "yes" if view.verdict.calibrated else "no"
    return (
        ("State", view.state),
        ("Node class", f"{view.plan.node_class}, {wording.counted(view.plan.devices, 'device')}"),
        ("Blocks counted" if view.verdict else "Blocks with receipts", f"{counted} of {len(view.plan.blocks)}"),
        ("Trials measured", f"{len(series.measured(receipts)):,} of {len(view.trials):,}"),
        ("Calibrated", calibrated),
        ("Submitted", wording.moment(view.created_at)),
    )


def _verdict_tables(view: AblationView) -> tuple[Table, ...]:
    if view.verdict is None:
        return ()
    return _filled(
        report_tables.verdict_table(view.verdict),
        report_tables.requirements_table(view.verdict),
        report_tables.secondary_table(view.verdict),
    )


def _filled(*tables: Table) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)
