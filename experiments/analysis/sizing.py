"""Sizing: how many blocks a question needs at the noise that was measured."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml

from experiments.analysis.noise.calibrate import estimator_digest, shape_digest
from experiments.analysis.statistics import dependence_of, log_ratio, percent, widening
from experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE
from experiments.design.load import load_values, parse_spec
from experiments.design.plan import Plan, make_plan, unsized
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
from experiments.design.spec import COMPARED_WITH_REPEATS, MIN_BLOCKS, MIN_EXACT_BLOCKS, AblationSpec
from experiments.errors import SpecError, SpecProblem
from experiments.records.calibration import Calibration, Sizing, workload_digest


def with_number(body: bytes, content_type: str, known: Sequence[Calibration]) -> tuple[bytes, str]:
    """Return (text, content type) of the spec in `body` with the number of blocks that it needs, if it says `auto`.

    Statistics need as many as find `adopt_if` with the power of a planned design at the upper bound of the noise of
    the noisiest device among `known`; an exact metric two for every seed; a calibration those that admit a device.
    Raises SpecError where the noise is not known, or no allowed number is enough.
    """
    if not parse_spec(body, content_type).design.blocks.auto:
        return body, content_type
    count, because = _number(_with(load_values(body, content_type), MIN_BLOCKS), known)
    values = load_values(body, content_type)
    values["design"]["blocks"] = {"count": count}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return f"# blocks: auto gave {count}: {because}\n{text}".encode(), CONTENT_TYPE


def _with(values: dict[str, Any], count: int) -> AblationSpec:
    """Return the spec with a number that only serves to plan its arms."""
    values["design"]["blocks"] = {"count": max(count, 2 * len(values["design"].get("seeds", ())))}
    return parse_spec(yaml.safe_dump(values, allow_unicode=True).encode(), CONTENT_TYPE)


def _number(spec: AblationSpec, known: Sequence[Calibration]) -> tuple[int, str]:
    if spec.purpose == "calibration":
        return ADMITTING_BLOCKS, "so many admit a device"
    if spec.verdict.primary.exact:
        return max(MIN_EXACT_BLOCKS, 2 * len(spec.design.seeds)), "every seed runs twice, to prove the metric exact"
    sizing = size_of(spec, make_plan(spec), known)
    if sizing is None:
        raise SpecError([unsized(spec)])
    repeats = (
        2 * len(spec.design.seeds) if any(one.rule in COMPARED_WITH_REPEATS for one in spec.verdict.require) else 0
    )
    noise = f"sd of d at most {sizing.sd_upper_pct:.2f} %"
    if sizing.blocks_needed is None:
        detail = f"no allowed number of blocks finds {sizing.adopt_if_pct:g} %: {noise_of(spec, sizing)}"
        raise SpecError([SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=FEWER_BLOCKS)])
    return max(sizing.blocks_needed, repeats), f"{noise} ({sizing.calibration}), looking for {sizing.adopt_if_pct:g} %"


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
