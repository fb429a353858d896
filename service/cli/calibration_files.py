"""Calibrations as files: made from A/A bundles, read beside the bundle that they are for."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from rich.markup import escape

from experiments.analysis.dependence import strength, widening
from experiments.analysis.noise.calibrate import calibration_problems, calibrations_of, join_calibrations
from experiments.documents import first_problem
from experiments.errors import BundleError, SpecProblem
from experiments.records.bundle_paths import is_bundle
from experiments.records.calibration import Calibration
from experiments.reporting import wording
from service.cli.bundles import read_bundle


def read_calibrations(paths: Sequence[Path] | None) -> tuple[Calibration, ...]:
    """Return the calibrations in files and A/A bundles, one for each key. Raises BundleError for anything else."""
    return join_calibrations(one for path in paths or () for one in _read(path))


def _read(path: Path) -> tuple[Calibration, ...]:
    if is_bundle(path):
        bundle = read_bundle(path)[1]
        file, receipts = bundle.plan_file, [trial.receipt for block in bundle.blocks for trial in block.trials]
        found = calibrations_of(file.plan, file.spec, receipts)
        if not found:
            raise _refused(path, "holds fewer than two A/A blocks; `ablate aa NODE_CLASS --out` plans them")
        return found
    try:
        one = Calibration.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise _refused(path, f"is neither a bundle nor a calibration: {first_problem(error)}") from error
    problems = calibration_problems(one)
    if problems:
        raise _refused(path, problems[0])
    return (one,)


def _refused(path: Path, detail: str) -> BundleError:
    return BundleError([SpecProblem(pointer=str(path), detail=detail)])


def write(found: Sequence[Calibration], path: Path) -> None:
    """Write the one calibration that was found. Raises BundleError for several."""
    if len(found) != 1:
        keys = ", ".join(f"{one.key.node_class} {one.key.device_serial}" for one in found)
        raise _refused(path, f"takes one calibration; the bundles give {len(found)}: {keys}")
    path.write_text(found[0].model_dump_json(indent=1) + "\n", encoding="utf-8")


def lines(one: Calibration) -> Sequence[str]:
    """Return a calibration as lines of rich markup."""
    return [
        f"[bold]{escape(one.key.node_class)} {escape(one.key.device_serial)}[/], {one.key.recipe}: "
        f"{one.blocks} A/A blocks, the last {wording.moment(one.measured_at)}",
        f"  sd of d {wording.size_percent(one.sd_pct)}, at most {wording.size_percent(one.sd_upper_pct)} (95 %); "
        f"mean {wording.percent(one.mean_pct)}",
        f"  autocorrelation {one.autocorrelation:+.2f}, for which tests of ten blocks are "
        f"{widening(strength(one.samples), 10):.2f} times wider; "
        f"the later trial {wording.percent(one.position_effect_pct)}; "
        f"drift {wording.percent(one.drift_pct_per_hour)} an hour; largest {one.largest_z:.1f} sd",
        f"  calibration {one.digest}",
    ]
