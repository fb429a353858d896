"""Verdict and report of what people name: an ablation of the service, or a bundle, which is judged here."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.errors import SpecError, SpecProblem
from experiments.records.bundle_paths import is_bundle
from service.cli.names import ablation_id
from service.client.api import Client

if TYPE_CHECKING:
    from experiments.analysis.verdicts import Verdict

CalibrationOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration", metavar="FILE", help="For a bundle: an A/A bundle, or what `ablate calibration` wrote."
    ),
]


def verdict_of(subject: str, calibrations: Sequence[Path] | None = None) -> "Verdict":
    """Return the verdict of an ablation of the service, or of a bundle, judged here with what is known about noise."""
    if is_bundle(Path(subject)):
        from service.cli import calibration_files, offline_work

        return offline_work.judge(Path(subject), calibration_files.read_calibrations(calibrations))
    only_offline(calibrations)
    with Client() as client:
        return client.ablations.verdict(ablation_id(client, subject))


def report_of(subject: str, calibrations: Sequence[Path] | None = None) -> tuple[str, str]:
    """Return (ablation id, report page) of an ablation of the service, or of a bundle, made here."""
    if is_bundle(Path(subject)):
        from service.cli import calibration_files, offline_work

        return offline_work.report(Path(subject), calibration_files.read_calibrations(calibrations))
    only_offline(calibrations)
    with Client() as client:
        found = ablation_id(client, subject)
        return found, client.ablations.report(found)


def only_offline(calibrations: Sequence[Path] | None) -> None:
    """Refuse calibrations where the service is asked. Raises SpecError."""
    if calibrations:
        detail = "--calibration is for bundles and for plan --out; the service goes by the A/A blocks that it knows"
        raise SpecError([SpecProblem(pointer="--calibration", detail=detail, hint="import the A/A bundle")])
