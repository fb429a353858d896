"""Sizing: how many blocks a question needs at the noise that was measured."""

from collections.abc import Sequence
from functools import partial

from experiments.analysis.dependence import dependence_of, widening
from experiments.analysis.noise.calibrate import estimator_digest, shape_digest
from experiments.analysis.statistics import log_ratio, percent
from experiments.design.aa_spec import ADMITTING_BLOCKS
from experiments.design.plan import Plan
from experiments.design.power import (
    FEWER_BLOCKS,
    MAX_BLOCKS,
    PLANNED_POWER,
    alpha_of,
    blocks_to_detect,
    detectable_per_sd,
    level_shares,
)
from experiments.design.problems import pointer
from experiments.design.spec import MIN_BLOCKS, AblationSpec
from experiments.errors import SpecProblem
from experiments.records.calibration import Calibration, workload_digest
from experiments.records.sizing import Sizing


def size_of(spec: AblationSpec, plan: Plan, known: Sequence[Calibration]) -> Sizing | None:
    """Return what `plan` can see; None where the noise is unknown, or the metric has none."""
    if not known:
        return None
    own = workload_of(plan, spec)
    alike = [one for one in known if one.key.workload == own and one.blocks >= ADMITTING_BLOCKS]
    if not alike or spec.verdict.primary.exact or spec.purpose == "calibration":
        return None
    noisiest = max(alike, key=lambda one: one.sd_upper_pct)
    dependence = dependence_of(alike)
    last_look = level_shares(spec.design.blocks.schedule)[-1]
    level, sd = alpha_of(1) * last_look / len(plan.variants), noisiest.sd_upper_pct / 100
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
    """Say which noise asks for so many blocks."""
    return (
        f"neighbouring trials there differ with an sd of up to {sizing.sd_upper_pct:.2f} %, over windows of "
        f"{spec.workload.steps.timed:,} timed steps"
    )


def sizing_problems(spec: AblationSpec, sizing: Sizing | None) -> list[SpecProblem]:
    """Return why a design is refused: it could not see the effect that its own rule asks for."""
    asked = spec.verdict.primary.adopt_if is not None and not spec.design.underpowered
    if sizing is None or not asked or sizing.mde_pct <= sizing.adopt_if_pct:
        return []
    needed = sizing.blocks_needed
    detail = (
        f"{spec.design.blocks.number} blocks find {sizing.mde_pct:.2f} % at the measured noise, and "
        f"the rule adopts from {sizing.adopt_if_pct:g} %: {noise_of(spec, sizing)}"
    )
    enough = f"no number up to {MAX_BLOCKS:,} is enough" if needed is None else f"{needed:,} blocks are enough"
    hint = f"{enough}; {FEWER_BLOCKS}; to run it all the same: design.underpowered: true"
    return [SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=hint)]


def budget_problems(spec: AblationSpec, sizing: Sizing | None, minutes: float | None) -> list[SpecProblem]:
    """Return why a number of blocks that the noise asked for is refused: it takes more `minutes` than are allowed.

    `minutes` are the device minutes that the design is expected to take; None where its arms were never measured.
    """
    allowed = spec.limits.device_minutes
    if sizing is None or minutes is None or minutes <= allowed:
        return []
    detail = (
        f"blocks: auto asks for {spec.design.blocks.number:,} blocks, about {minutes:,.1f} device minutes, and "
        f"limits.device_minutes allows {allowed:g}: {noise_of(spec, sizing)}, and the rule adopts from "
        f"{sizing.adopt_if_pct:g} %"
    )
    return [SpecProblem(pointer=pointer("limits", "device_minutes"), detail=detail, hint=FEWER_BLOCKS)]


def workload_of(plan: Plan, spec: AblationSpec) -> str:
    """Return the digest of what a calibration must agree with to size `plan`, on any device and whatever code ran."""
    config, recipe = plan.baseline.config, spec.workload.recipe
    estimator = estimator_digest(config, spec.verdict.primary.metric)
    return workload_digest(plan.node_class, recipe, shape_digest(config), estimator)
