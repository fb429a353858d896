"""Sizing: the number of blocks that a question needs at the measured noise."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from experiments.analysis.noise.calibrate import estimator_digest, shape_digest
from experiments.analysis.statistics import dependence_of, log_ratio, percent, widening
from experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE
from experiments.design.load import load_values, parse_spec, spec_yaml
from experiments.design.metrics import LOSS_METRICS
from experiments.design.plan import Plan, make_plan, unsized
from experiments.design.power import (
    FEWER_BLOCKS,
    MAX_BLOCKS,
    PLANNED_POWER,
    blocks_to_detect,
    detectable_per_sd,
    level_shares,
)
from experiments.design.problems import pointer
from experiments.design.spec import MIN_BLOCKS, MIN_EXACT_BLOCKS, AblationSpec
from experiments.errors import SpecError, SpecProblem
from experiments.records.calibration import Calibration, Sizing, workload_digest


def with_number(body: bytes, content_type: str, calibrations: Sequence[Calibration]) -> tuple[bytes, str]:
    """Return (text, content type) of the spec in `body`, with `blocks: auto` replaced by the number that it needs.

    - Statistics need enough blocks to detect `adopt_if` with the power of a planned design, at the upper bound of the
      noise of the noisiest device in `calibrations`.
    - An exact metric needs two blocks per seed.
    - A calibration needs the number that admits a device.

    Raises SpecError if the noise is unknown or no allowed number is enough.
    """
    if not parse_spec(body, content_type).design.blocks.auto:
        return body, content_type
    values = load_values(body, content_type)
    count, because = _number(_planned(values), calibrations)
    values["design"]["blocks"] = {"count": count}
    return f"# blocks: auto gave {count}: {because}\n".encode() + spec_yaml(values), CONTENT_TYPE


def _planned(values: dict[str, Any]) -> AblationSpec:
    """Return the spec with a provisional number of blocks, enough to plan its arms; changes `values`."""
    seeds = values["design"].get("seeds", ())
    number = seeds if isinstance(seeds, int) else len(seeds)
    values["design"]["blocks"] = {"count": max(MIN_BLOCKS, 2 * number)}
    return parse_spec(spec_yaml(values), CONTENT_TYPE)


def _number(spec: AblationSpec, calibrations: Sequence[Calibration]) -> tuple[int, str]:
    if spec.purpose == "calibration":
        return ADMITTING_BLOCKS, "this number admits a device"
    if spec.verdict.primary.over_seeds:
        detail = (
            f"blocks: auto knows the noise of speeds, not how '{spec.verdict.primary.metric}' differs between seeds"
        )
        hint = "give a number, such as {count: 12} with seeds: 12; the verdict says how many seeds would answer"
        raise SpecError([SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=hint)])
    if spec.verdict.primary.exact:
        return max(MIN_EXACT_BLOCKS, 2 * len(spec.design.seeds)), "every seed runs twice, to prove the metric exact"
    sizing = size_of(spec, make_plan(spec), calibrations)
    if sizing is None:
        raise SpecError([unsized(spec)])
    if sizing.blocks_needed is None:
        detail = f"no allowed number of blocks detects {sizing.adopt_if_pct:g} %: {noise_of(spec, sizing)}"
        raise SpecError([SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=FEWER_BLOCKS)])
    of_losses = any(one.not_worse_by and one.metric in LOSS_METRICS for one in spec.verdict.require)
    seeds = len(spec.design.seeds) if of_losses else 0
    noise = f"sd of d at most {sizing.sd_upper_pct:.2f} % ({sizing.calibration})"
    return max(sizing.blocks_needed, seeds), f"{noise}, to detect {sizing.adopt_if_pct:g} %"


def size_of(spec: AblationSpec, plan: Plan, calibrations: Sequence[Calibration]) -> Sizing | None:
    """Return the effect that `plan` can detect; None if the noise is unknown or the metric has none."""
    if not calibrations:
        return None
    own = workload_of(plan, spec)
    alike = [one for one in calibrations if one.key.workload == own and one.blocks >= ADMITTING_BLOCKS and one.sd_pct]
    if not alike or spec.verdict.primary.exact or spec.verdict.primary.over_seeds or spec.purpose == "calibration":
        return None
    noisiest = max(alike, key=lambda one: one.sd_upper_pct)
    dependence = dependence_of(alike)
    last_look = level_shares(spec.design.blocks.schedule)[-1]
    level, sd = spec.verdict.level_of(1) * last_look / len(plan.variants), noisiest.sd_upper_pct / 100
    threshold = spec.verdict.primary.threshold_pct
    wider = partial(widening, dependence)
    needed = blocks_to_detect(
        log_ratio(threshold), sd, minimum=MIN_BLOCKS, level=level, power=PLANNED_POWER, widening=wider
    )
    return Sizing(
        calibration=noisiest.digest,
        sd_upper_pct=noisiest.sd_upper_pct,
        mde_pct=percent(detectable_per_sd(len(plan.blocks), level=level) * wider(len(plan.blocks)) * sd),
        adopt_if_pct=threshold,
        blocks_needed=needed,
    )


def noise_of(spec: AblationSpec, sizing: Sizing) -> str:
    """Return the noise behind a number of blocks as text."""
    noise = f"neighbouring trials there have a standard deviation of up to {sizing.sd_upper_pct:.2f} %"
    return f"{noise}, over windows of {spec.workload.steps.timed:,} timed steps"


def sizing_problems(spec: AblationSpec, sizing: Sizing | None) -> list[SpecProblem]:
    """Return the problem of a design that cannot detect the effect of its own rule."""
    checked = spec.verdict.primary.adopt_if is not None and not spec.design.underpowered
    if sizing is None or not checked or sizing.mde_pct <= sizing.adopt_if_pct:
        return []
    needed = sizing.blocks_needed
    detail = (
        f"{spec.design.blocks.number} blocks detect {sizing.mde_pct:.2f} % at the measured noise, but "
        f"the rule adopts from {sizing.adopt_if_pct:g} %: {noise_of(spec, sizing)}"
    )
    enough = f"no number up to {MAX_BLOCKS:,} is enough" if needed is None else f"{needed:,} blocks are enough"
    hint = f"{enough}; {FEWER_BLOCKS}; to run it anyway: design.underpowered: true"
    return [SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=hint)]


def budget_problems(spec: AblationSpec, sizing: Sizing | None, minutes: float | None) -> list[SpecProblem]:
    """Return the problem of a number of blocks from `auto` that takes more than `limits.device_minutes`.

    `minutes` are the expected device minutes of the design; None if its arms were never measured.
    """
    allowed = spec.limits.device_minutes
    if sizing is None or minutes is None or minutes <= allowed:
        return []
    detail = (
        f"blocks: auto asks for {spec.design.blocks.number:,} blocks, about {minutes:,.1f} device minutes, but "
        f"limits.device_minutes allows {allowed:g}: {noise_of(spec, sizing)}, and the rule adopts from "
        f"{sizing.adopt_if_pct:g} %"
    )
    return [SpecProblem(pointer=pointer("limits", "device_minutes"), detail=detail, hint=FEWER_BLOCKS)]


def workload_of(plan: Plan, spec: AblationSpec) -> str:
    """Return the digest that a calibration must have to size `plan`, on any device and with any code."""
    config, recipe = plan.baseline.config, spec.workload.name
    estimator = estimator_digest(config, spec.verdict.primary.metric)
    return workload_digest(plan.node_class, recipe, shape_digest(config), estimator)
