"""One self-contained HTML page for an ablation, with the answer first; no script, no external resource."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ablate.experiments.analysis.arm_summary import measured_trials
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.metrics import CURVE_METRICS, METRICS
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.between import between_variants
from ablate.experiments.reporting.changes import changed_arms
from ablate.experiments.reporting.pages import circumstance_tables, evidence_tables
from ablate.experiments.reporting.pages.circumstance_tables import rule_in_words
from ablate.experiments.reporting.pages.evidence_tables import compilation_table
from ablate.experiments.reporting.pages.first_screen import deciding_values, first_screen, trial_values
from ablate.experiments.reporting.pages.program_tables import program_tables
from ablate.experiments.reporting.pictures import registry
from ablate.experiments.reporting.pictures.drawing import Picture
from ablate.experiments.reporting.pictures.theme import theme_css
from ablate.experiments.reporting.sentences import ORIGINS
from ablate.experiments.reporting.step_traces import step_table
from ablate.experiments.reporting.table import Table
from ablate.experiments.reporting.verdict_layout import is_exact, over_seeds
from ablate.experiments.reporting.view import AblationView
from ablate.experiments.reporting.wording import false_verdicts

TEMPLATES = Path(__file__).parent / "templates"


def make_environment(*folders: Path) -> Environment:
    """Return the environment for the templates in `folders` and the report's: escaped, undefined names are errors."""
    return Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(view: AblationView) -> str:
    """Render the report of `view`; equal views give equal pages, in every state of the ablation."""
    pictures = registry.draw_all(view)
    curve = None if view.verdict is None else _curve(view.verdict, pictures)
    return (
        _environment()
        .get_template("report.html")
        .render(
            view=view,
            answer=view.answer,
            changed=changed_arms(view.plan.arms),
            first=first_screen(view),
            deciding=deciding_values(view),
            trials=trial_values(view),
            glance=_glance(view),
            pictures=pictures,
            curve=curve,
            without_curve=_without_curve(view, pictures),
            more_pictures=[one for one in pictures if one.name not in (*_PLACED, curve)],
            step=step_table(view),
            answer_tables=_answer_tables(view),
            detail_tables=_filled(
                evidence_tables.arms_table(view),
                evidence_tables.unmeasured_table(view),
                evidence_tables.gates_table(view),
                compilation_table(view),
                evidence_tables.kernels_table(view),
                evidence_tables.exchanges_table(view),
                *program_tables(view),
                evidence_tables.blocks_table(view),
            ),
            evidence=None if view.verdict is None else _evidence(view.verdict),
            ledger=None if view.verdict is None else false_verdicts(view.verdict.circumstances.admission.ledger),
            provenance=evidence_tables.provenance_table(view),
            rule=evidence_tables.rule_table(view.verdict.rule) if view.verdict else None,
            rule_in_words=rule_in_words(view.verdict.rule) if view.verdict else "",
            receipts=evidence_tables.receipts_table(view),
        )
    )


_PLACED = ("forest", "step-memory")
"""Pictures with a place of their own."""
_OF_LEARNING, _OF_COSTS = ("curves", "logged", "losses", "differences"), ("differences", "steps")
"""Pictures of a loss or of a number that a program reports, and of times and memory, the best one first."""


def _curve(verdict: Verdict, pictures: Sequence[Picture]) -> str | None:
    """Return the picture that stands beside the answer; None without one."""
    metric = METRICS.get(verdict.rule["primary"]["metric"])
    costs = metric is not None and metric.kind != "loss" and metric.name not in CURVE_METRICS
    names = {picture.name for picture in pictures}
    return next((name for name in (_OF_COSTS if costs else _OF_LEARNING) if name in names), None)


def _without_curve(view: AblationView, pictures: Sequence[Picture]) -> str:
    """Say what a program has to print for a curve of its training; empty where there is one, or nothing ran."""
    if not view.plan.baseline.config.own_process or not view.receipts:
        return ""
    if not {"curves", "logged", "losses"}.isdisjoint(picture.name for picture in pictures):
        return ""
    return "There is no curve of the training, because the program prints no number again and again."


@cache
def _environment() -> Environment:
    environment = make_environment()
    environment.globals["theme_css"] = Markup(theme_css())  # noqa: S704  # made from our own table
    return environment


class Fact(NamedTuple):
    """One fact beside the question."""

    label: str
    value: str
    link: str = ""
    """Id of the section with details; empty without one."""


CALIBRATIONS, ATTEMPTS, FAMILY = "calibrations", "attempts", "family"
"""Ids of the sections on the circumstances of a verdict."""


def _glance(view: AblationView) -> tuple[Fact, ...]:
    counted = view.verdict.blocks_counted if view.verdict else len(view.whole_blocks.blocks)
    return (
        Fact("State", view.state),
        Fact("Node class", f"{view.plan.node_class}, {wording.counted(view.plan.devices, 'device')}"),
        Fact(
            "Blocks counted" if view.verdict else "Blocks with receipts", wording.share(counted, len(view.plan.blocks))
        ),
        Fact("Trials measured", wording.share(len(measured_trials(view.receipts)), len(view.trials))),
        *(_circumstances(view.verdict) if view.verdict else (Fact("Calibrated", "unknown until the verdict"),)),
        Fact("Submitted", wording.moment(view.created_at)),
    )


def _circumstances(verdict: Verdict) -> Iterator[Fact]:
    circumstances = verdict.circumstances
    blocks = sum(calibration.blocks for calibration in circumstances.admission.calibrations)
    measured = f"yes, {wording.counted(blocks, 'A/A block')}" if blocks else "yes"
    calibrated = measured if verdict.calibrated else "no"
    if is_exact(verdict):
        calibrated = "not needed, the metric is exact"
    elif over_seeds(verdict) and not blocks:
        calibrated = "not needed, the seeds show the noise"
    yield Fact("Calibrated", calibrated, CALIBRATIONS)
    keys = {signer.key for signer in circumstances.signers}
    own = verdict.seeds
    if own.taken:
        yield Fact("Seeds", f"{len(own.used)}, {ORIGINS[own.origin]}" if own.used else "none ran")
    yield Fact("Signed", "no" if None in keys else f"by {wording.counted(len(keys), 'key')}")
    if circumstances.attempts:
        yield Fact("Broken attempts", f"{len(circumstances.attempts):,}", ATTEMPTS)
    if circumstances.family.earlier:
        yield Fact("Asking", f"{circumstances.family.number} of this question", FAMILY)


def _evidence(verdict: Verdict) -> tuple[tuple[str, Table, str], ...]:
    """Return (id, table, text instead of an empty table) for each of the circumstances."""
    circumstances, admission = verdict.circumstances, verdict.circumstances.admission
    mended = f" To calibrate: {admission.mended_by}." if admission.mended_by else ""
    refused = admission.refused_because
    lacking = f"Uncalibrated: {refused}.{mended}" if refused else "Calibrated."
    if is_exact(verdict):
        lacking = "The deciding metric is exact: values decide, not statistics, so no calibration is needed."
    elif over_seeds(verdict):
        lacking = "The seeds show the noise, so no calibration is needed."
    calibrations = circumstance_tables.calibrations_table(circumstances), lacking
    unbroken = "No attempt at a block broke. A trial that fails in its block is a result of its arm."
    attempts = circumstance_tables.attempts_table(circumstances), unbroken
    family = circumstance_tables.family_table(circumstances), _first_asking(circumstances)
    return (CALIBRATIONS, *calibrations), (ATTEMPTS, *attempts), (FAMILY, *family)


def _first_asking(circumstances: Circumstances) -> str:
    if circumstances.family.question_digest is None:
        return "Only a service counts how often a question is asked."
    return "No earlier ablation of this service compared the same two arms by this metric on this node class."


def _answer_tables(view: AblationView) -> tuple[Table, ...]:
    if view.answer is None or view.verdict is None:
        return ()
    return (*view.answer.tables, *_filled(between_variants(view.verdict)))


def _filled(*tables: Table) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)
