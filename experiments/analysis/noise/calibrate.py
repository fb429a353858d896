"""From the receipts of A/A blocks to a calibration. All numbers follow from the receipts alone."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import scipy

from ablate.experiments.analysis.guards import block_problems, median_clock_mhz, receipt_problems
from ablate.experiments.analysis.statistics import log_of_ratio
from ablate.experiments.design.aa_spec import REPEAT, SENTINEL
from ablate.experiments.design.kinds.kind import ArmConfig
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.rule import (
    COMPILE_TIME,
    PROCESS_TIMES,
    estimator_of,
    process_estimator,
    window_estimator,
)
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.digest import digest
from ablate.experiments.documents import seal
from ablate.experiments.outcomes import BASELINE, Outcome
from ablate.experiments.records.calibration import AABlock, Calibration, CalibrationKey, Source
from ablate.experiments.records.receipts import Receipt, device_identity, identities, read_named

METRIC = "tokens_per_s"
"""All metrics of the window follow from throughput, so its noise calibrates them all."""
COMPILE_METRIC = "compile_s"
_BY_ESTIMATOR = {
    digest({"estimator": COMPILE_TIME}): COMPILE_METRIC,
    **{
        digest({"estimator": process_estimator(metric, turns=turns)}): metric
        for metric in PROCESS_TIMES
        for turns in (False, True)
    },
}
"""Metrics that no other metric shares its noise with, by the digest of their estimator."""
CONFIDENCE = 0.95


def key_of(spec: AblationSpec, receipt: Receipt) -> CalibrationKey:
    """Return the key that A/A blocks must have to calibrate the trial of `receipt`."""
    return key_for(receipt, recipe=spec.workload.name, metric=spec.verdict.primary.metric)


def key_for(receipt: Receipt, *, recipe: str, metric: str) -> CalibrationKey:
    """Return the key of A/A blocks for a trial of `recipe` that `metric` judges."""
    environment = receipt.environment
    return CalibrationKey(
        device_serial=_together(identities(environment)),
        node_class=environment.node_class,
        recipe=recipe,
        shape_digest=shape_digest(receipt.config),
        estimator_digest=estimator_digest(receipt.config, metric),
        software_digest=software_digest(receipt.digests.code, environment.versions),
        metric=metric if _is_named_in_key(metric) else None,
    )


def serials_of(devices: Sequence[tuple[str, str | None]], node_name: str) -> set[str]:
    """Return the identities under which trials on a node with `devices` are calibrated: trials use the first ones."""
    own = [device_identity(serial, node_name, name) for name, serial in devices]
    return {_together(own[:number]) for number in range(1, len(own) + 1)} | set(own)


def _together(devices: Iterable[str]) -> str:
    return " + ".join(devices)


def software_digest(code_digest: str, versions: Mapping[str, str]) -> str:
    """Return the digest of the code that ran and of the software versions."""
    return digest({"code": code_digest, "versions": dict(versions)})


def shape_digest(config: ArmConfig) -> str:
    """Return the digest of what all arms share: of a recipe, its configuration without gates, seed and steps."""
    return digest(config.shape())


def estimator_digest(config: ArmConfig, metric: str) -> str:
    """Return the digest of the estimator of `metric` and, for a metric of the window, of a TrainConfig's window."""
    if metric in PROCESS_TIMES:
        return digest({"estimator": process_estimator(metric, turns=config.turns)})
    if metric == COMPILE_METRIC:
        return digest({"estimator": COMPILE_TIME})
    values = config.values_with_seed["steps"]
    steps = {name: value for name, value in values.items() if value or name != "val_every"}  # a later field
    if _is_named_in_key(metric):
        return digest({"estimator": estimator_of(metric, config.steps.slice, turns=config.turns), "steps": steps})
    steps = {name: value for name, value in steps.items() if name not in {"val_rows", "slice"}}
    return digest({"estimator": window_estimator(config.steps.slice), "steps": steps})


def _measured_by(spec: AblationSpec) -> str:
    own = spec.verdict.primary.metric
    return own if own in _BY_ESTIMATOR.values() or _is_named_in_key(own) else METRIC


def _is_named_in_key(metric: str) -> bool:
    return metric not in METRICS or METRICS[metric].named_in_key


def metric_of(key: CalibrationKey) -> str:
    """Return the metric whose noise A/A blocks of `key` measure."""
    return key.metric or _BY_ESTIMATOR.get(key.estimator_digest, METRIC)


def aa_blocks_of(
    plan: Plan, spec: AblationSpec, receipts: Iterable[Receipt], signed_by: Mapping[int, str] | None = None
) -> Iterator[tuple[CalibrationKey, AABlock]]:
    """Yield the A/A blocks in `receipts`: those with measured baseline and repeat and without a broken guard.

    The repeat is the variant of a calibration, or the control of an ordinary ablation. `signed_by` has the keys that
    signed blocks, by index.
    """
    repeat, source = _repeat_of(plan, spec)
    if repeat is None:
        return
    by_block: dict[int, dict[str, Receipt]] = {}
    for receipt in receipts:
        if receipt.outcome is Outcome.MEASURED and receipt.arm in {BASELINE, repeat}:
            by_block.setdefault(receipt.ids.block_index, {})[receipt.arm] = receipt
    for index in sorted(by_block):
        pair = by_block[index]
        if len(pair) == 2 and not _guards_hit(plan, tuple(pair.values())):
            block = aa_block(
                _measured_by(spec),
                pair[BASELINE],
                pair[repeat],
                source=source,
                margin_pct=spec.verdict.primary.margin_pct,
                signed_by=(signed_by or {}).get(index),
            )
            yield from [] if block is None else [(key_of(spec, pair[BASELINE]), block)]


def _repeat_of(plan: Plan, spec: AblationSpec) -> tuple[str | None, Source]:
    """Return the arm that repeats the baseline, and its purpose."""
    if spec.purpose == "calibration":
        return REPEAT, "sentinel" if SENTINEL in spec.labels else "calibration"
    return None if plan.control is None else plan.control.name, "hidden"


def _guards_hit(plan: Plan, pair: Sequence[Receipt]) -> bool:
    return bool(block_problems(pair)) or any(receipt_problems(receipt, plan) for receipt in pair)


def aa_block(
    metric: str, baseline: Receipt, repeat: Receipt, *, source: Source, margin_pct: float, signed_by: str | None
) -> AABlock | None:
    """Return the A/A block of two trials by the noise of `metric`; None if their values have no ratio."""
    own, other = (read_named(metric, receipt) or 0.0 for receipt in (repeat, baseline))
    difference = log_of_ratio(own, other)
    if difference is None:
        return None
    return AABlock(
        ablation=baseline.ids.ablation,
        block_index=baseline.ids.block_index,
        source=source,
        started_at=min(baseline.started_at, repeat.started_at),
        difference=difference,
        place=repeat.ids.position - baseline.ids.position,
        log_rate=(math.log(own) + math.log(other)) / 2,
        clock_mhz=median_clock_mhz((baseline, repeat)),
        margin_pct=margin_pct,
        receipts=(baseline.digest, repeat.digest),
        signed_by=signed_by,
    )


def calibrations_of(
    plan: Plan, spec: AblationSpec, receipts: Iterable[Receipt], signed_by: Mapping[int, str] | None = None
) -> tuple[Calibration, ...]:
    """Return the calibrations from the A/A blocks in `receipts`, one per key with at least two blocks."""
    return calibrate_all(aa_blocks_of(plan, spec, receipts, signed_by))


def join_calibrations(calibrations: Iterable[Calibration]) -> tuple[Calibration, ...]:
    """Return one calibration per key, from all its A/A blocks."""
    return calibrate_all((one.key, block) for one in calibrations for block in one.samples)


def calibrate_all(blocks: Iterable[tuple[CalibrationKey, AABlock]]) -> tuple[Calibration, ...]:
    """Return a calibration per key with at least two A/A blocks, newest last; a block counts once."""
    by_key: dict[CalibrationKey, dict[tuple[str, int], AABlock]] = {}
    for key, block in blocks:
        by_key.setdefault(key, {})[block.ablation, block.block_index] = block
    calibrations = (calibrate(key, list(own.values())) for key, own in by_key.items() if len(own) > 1)
    return tuple(sorted(calibrations, key=lambda one: one.measured_at))


def calibrate(key: CalibrationKey, blocks: Sequence[AABlock]) -> Calibration:
    """Return the sealed calibration from at least two A/A blocks of `key`."""
    samples = tuple(sorted(blocks, key=lambda block: (block.started_at, block.ablation, block.block_index)))
    return seal(Calibration(key=key, metric=metric_of(key), samples=samples, **_numbers(key, samples), digest=""))


def _numbers(key: CalibrationKey, samples: Sequence[AABlock]) -> dict[str, Any]:
    d = np.array([block.difference for block in samples])
    away = d - d.mean()
    sd = float(d.std(ddof=1))
    clocks = [block.clock_mhz for block in samples if block.clock_mhz is not None]
    return {
        "blocks": len(samples),
        "sd_pct": 100 * sd,
        "sd_upper_pct": 100 * sd * upper_factor(len(samples)),
        "mean_pct": 100 * float(d.mean()),
        "autocorrelation": float(away[1:] @ away[:-1] / (away @ away)) if sd else 0.0,
        "position_effect_pct": 100 * float(np.mean(d * np.sign([block.place for block in samples]))),
        "drift_pct_per_hour": 100 * _drift_per_hour(samples) if sd and key.metric is None else 0.0,
        "largest_z": float(np.abs(away).max()) / sd if sd else 0.0,
        "clock_mhz": statistics.median(clocks) if len(clocks) == len(samples) else None,
        "variance_p": _variance_p(samples),
        "ablations": tuple(dict.fromkeys(block.ablation for block in samples)),
        "measured_at": samples[-1].started_at,
    }


def upper_factor(blocks: int) -> float:
    """Return the ratio of the upper 95 % bound of a standard deviation to its estimate from `blocks` differences."""
    return math.sqrt((blocks - 1) / float(scipy.special.chdtri(blocks - 1, CONFIDENCE)))


def _drift_per_hour(samples: Sequence[AABlock]) -> float:
    """Return the slope of ln(throughput) per hour, with times and rates centred on the means of their ablation."""
    hours, rates = [], []
    for ablation in dict.fromkeys(block.ablation for block in samples):
        own = [block for block in samples if block.ablation == ablation]
        at = np.array([seconds(block.started_at) for block in own]) / 3600
        rate = np.array([block.log_rate for block in own])
        hours.append(at - at.mean())
        rates.append(rate - rate.mean())
    at, rate = np.concatenate(hours), np.concatenate(rates)
    return float(at @ rate / (at @ at)) if at @ at else 0.0


def _variance_p(samples: Sequence[AABlock]) -> float | None:
    """Return the p value of an F test whether later blocks are noisier than those of the calibration."""
    groups: dict[bool, list[float]] = {True: [], False: []}
    for block in samples:
        groups[block.source == "calibration"].append(block.difference)
    base, later = groups[True], groups[False]
    if len(base) < 2 or len(later) < 2:
        return None
    noise = statistics.variance(base)
    if noise == 0:
        return None
    return float(scipy.special.fdtrc(len(later) - 1, len(base) - 1, statistics.variance(later) / noise))


def seconds(moment: str) -> float:
    """Return an RFC 3339 time as seconds since 1970."""
    return datetime.fromisoformat(moment).timestamp()
