"""Calibrations: read from A/A bundles, described in lines."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from ablate.experiments.analysis.noise.calibrate import calibrations_of, join_calibrations
from ablate.experiments.analysis.statistics import dependence_of, percent, strength_of, widening
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.power import FEWER_BLOCKS, detectable_per_sd
from ablate.experiments.errors import BundleError, SpecProblem
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.reporting import wording
from ablate.service.cli.offline import read_bundle

if TYPE_CHECKING:
    from ablate.service.schemas.nodes import CalibrationList, CalibrationPublic

_BLOCKS = (6, 20, 60)
"""Numbers of blocks whose detectable effect `ablate aa` prints."""
_ADVICE_SD_PCT = 5.0
"""The sd from which `ablate aa` advises a quieter machine or a longer window."""


def read_calibrations(paths: Sequence[Path] | None) -> tuple[Calibration, ...]:
    """Return the calibrations in A/A bundles, one for each key. Raises BundleError for other files."""
    return join_calibrations(calibration for path in paths or () for calibration in _read(path))


def _read(path: Path) -> tuple[Calibration, ...]:
    bundle = read_bundle(path)[1]
    file, receipts = bundle.plan_file, [trial.receipt for block in bundle.blocks for trial in block.trials]
    calibrations = calibrations_of(file.plan, file.spec, receipts, bundle.signed_by)
    if not calibrations:
        detail = "has fewer than two A/A blocks; `ablate aa NODE_CLASS --out` plans them"
        raise BundleError([SpecProblem(pointer=str(path), detail=detail)])
    return calibrations


def calibration_lines(calibration: Calibration) -> Sequence[str]:
    """Return a calibration as lines of rich markup."""
    key = calibration.key
    return [
        f"[bold]{escape(key.node_class)} {escape(key.device_serial)}[/], "
        f"{wording.metric(calibration.metric)} of {key.recipe}: "
        f"{calibration.blocks} A/A blocks, the last {wording.moment(calibration.measured_at)}",
        f"  sd of d {wording.size_percent(calibration.sd_pct)}, "
        f"at most {wording.size_percent(calibration.sd_upper_pct)} (95 %); "
        f"mean {wording.percent(calibration.mean_pct)}",
        f"  autocorrelation of neighbouring blocks {calibration.autocorrelation:+.2f}, which makes intervals of ten "
        f"blocks {_widening(calibration, 10):.2f} times as wide; "
        f"the later trial {wording.percent(calibration.position_effect_pct)}; "
        f"{f'drift {drift}; ' if (drift := wording.drift(calibration)) else ''}largest {calibration.largest_z:.1f} sd",
        f"  calibration {calibration.digest}",
    ]


def noise_lines(answer: "CalibrationList", ablation_id: str) -> Iterator[str]:
    """Yield the noise that an A/A ablation measured on each device, and the effects that ablations there can detect."""
    rows = [row for row in answer.items if ablation_id in row.calibration.ablations]
    if not rows:
        yield f"It measured no noise: fewer than two of its blocks are valid. Why: ablate show {ablation_id}"
    for row in rows:
        yield from _noise_of_device(row)


def _noise_of_device(row: "CalibrationPublic") -> Iterator[str]:
    calibration = row.calibration
    key, counted = calibration.key, wording.counted(calibration.blocks, "A/A block")
    where, metric = f"{key.node_class} {key.device_serial}: {counted}", wording.metric(calibration.metric)
    if calibration.bit_repeatable and row.problem is None:
        yield f"{where}; {metric} repeats bit for bit, so it has no noise and needs no more A/A blocks"
        yield "  only another seed changes it: more seeds detect smaller effects"
        return
    yield (
        f"{where}; neighbouring trials of one arm differ with an sd of {wording.size_percent(calibration.sd_pct)} "
        f"(at most {wording.size_percent(calibration.sd_upper_pct)})"
    )
    if row.problem is not None:
        yield f"  no verdict by {metric} yet: {row.problem}; {row.mended_by}"
        return
    effects = ", ".join(f"{blocks} blocks detect {_effect(calibration, blocks)}" for blocks in _BLOCKS)
    yield f"  ablations and sessions that {metric} decides can run now; with one variant {effects}"
    if calibration.blocks < ADMITTING_BLOCKS:
        yield f"  with {ADMITTING_BLOCKS} A/A blocks they would detect smaller effects"
    if calibration.sd_pct >= _ADVICE_SD_PCT:
        yield f"  {FEWER_BLOCKS}"


def _effect(calibration: Calibration, blocks: int) -> str:
    """Return the effect that so many blocks detect with 80 % power at the upper bound of the noise."""
    sd = calibration.sd_upper_pct / 100 * _widening(calibration, blocks)
    return wording.size_percent(percent(detectable_per_sd(blocks) * sd))


def _widening(calibration: Calibration, blocks: int) -> float:
    return widening(strength_of(dependence_of([calibration])), blocks)
