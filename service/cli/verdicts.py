"""Verdict and report of an ablation or a bundle, and the exit code of a verdict."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.ids import COMMIT_LABEL
from ablate.experiments.outcomes import EXIT_CODES, Decision, ExitCode, Required
from ablate.experiments.records.bundle_files import is_bundle
from ablate.service.cli.arguments import ablation_id
from ablate.service.client.api import Client

if TYPE_CHECKING:
    from ablate.experiments.analysis.verdicts import VariantVerdict, Verdict
    from ablate.experiments.reporting.terminal.markdown import Asked

RequireOption = Annotated[
    Required | None,
    typer.Option(
        help="Exit with 0 only if every variant has this decision; not-worse: only if each is proved better or same, "
        "and meets all requirements."
    ),
]
CalibrationOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="For a bundle: an A/A bundle. Repeat it for more.",
    ),
]


def exit_code(variants: "Sequence[VariantVerdict]", require: Required | None) -> ExitCode:
    """Return the exit code of `ablate verdict` for these variants."""
    decisions = [variant.decision for variant in variants]
    if require is not None:
        others = [EXIT_CODES[variant.decision] for variant in variants if not variant.meets(require)]
        return (max(others) or ExitCode.UNMET) if others else ExitCode.DONE
    if Decision.ADOPT in decisions:
        return ExitCode.DONE
    return max((EXIT_CODES[decision] for decision in decisions), default=ExitCode.ERROR)


def verdict_of(subject: str, calibrations: Sequence[Path] | None = None) -> "Verdict":
    """Return the verdict of an ablation of the service, or of a bundle, which is judged here with `calibrations`."""
    if is_bundle(Path(subject)):
        from ablate.service.cli import offline
        from ablate.service.cli.calibrations import read_calibrations

        return offline.judge(Path(subject), read_calibrations(calibrations))
    reject_calibrations(calibrations)
    with Client() as client:
        return client.ablations.verdict(ablation_id(client, subject))


def asked_of(subject: str) -> "Asked | None":
    """Return the question, commits and links of an ablation of the service; None for a bundle, which has no page."""
    if is_bundle(Path(subject)):
        return None
    with Client() as client:
        return asked(client, subject)


def asked(client: Client, name: str) -> "Asked":
    """Return the question, commits and links of an ablation."""
    from ablate.experiments.reporting.terminal.markdown import Asked

    row, base = client.ablations.find(name), client.url.rstrip("/")
    commits = {
        key.removeprefix(COMMIT_LABEL): value for key, value in row.labels.items() if key.startswith(COMMIT_LABEL)
    }
    links = {"page": f"{base}/a/{row.id}", "report": f"{base}/a/{row.id}#answer", "MLflow": row.mlflow_url}
    return Asked(question=row.question, commits=commits, links={name: url for name, url in links.items() if url})


def report_of(subject: str, calibrations: Sequence[Path] | None = None) -> tuple[str, str]:
    """Return (ablation id, report page) of an ablation of the service, or of a bundle, whose page is made here."""
    if is_bundle(Path(subject)):
        from ablate.service.cli import offline
        from ablate.service.cli.calibrations import read_calibrations

        return offline.report(Path(subject), read_calibrations(calibrations))
    reject_calibrations(calibrations)
    with Client() as client:
        name = ablation_id(client, subject)
        return name, client.ablations.report(name)


def reject_calibrations(calibrations: Sequence[Path] | None) -> None:
    """Raise SpecError if there are calibrations: the service uses its own."""
    if calibrations:
        detail = "--calibration is for bundles and for plan --out; the service uses the A/A blocks that it has"
        raise SpecError([SpecProblem(pointer="--calibration", detail=detail, hint="import the A/A bundle")])
