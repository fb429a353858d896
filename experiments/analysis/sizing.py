"""Sizing: the number of blocks that a question needs at the measured noise."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from ablate.experiments.analysis.noise.calibrate import estimator_digest, shape_digest, upper_factor
from ablate.experiments.analysis.statistics import RATIO, SHARE, Array, Scale, dependence_of, strength_of, widening
from ablate.experiments.analysis.verdicts import Verdict, unit_of_shares
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE
from ablate.experiments.design.load import load_values, spec_of
from ablate.experiments.design.metrics import LOSS_METRICS, METRICS
from ablate.experiments.design.plan import Plan, make_plan, replan, unsized
from ablate.experiments.design.power import (
    FEWER_BLOCKS,
    MAX_BLOCKS,
    PLANNED_POWER,
    Look,
    adopted_from,
    blocks_to_detect,
    detectable_per_sd,
)
from ablate.experiments.design.problems import pointer
from ablate.experiments.design.rule import blocks_for_rarest_event
from ablate.experiments.design.spec import MAX_SEEDS, MIN_BLOCKS, MIN_EXACT_BLOCKS, AblationSpec
from ablate.experiments.design.spec_values import show_percent
from ablate.experiments.design.spec_yaml import spec_yaml
from ablate.experiments.design.verdict_rule import Primary
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.records.calibration import Calibration, ExpectedBlocks, Sizing, workload_digest


class PlannedSpec(NamedTuple):
    """A spec with a number of blocks, and its plan without a control."""

    text: bytes
    content_type: str
    spec: AblationSpec
    plan: Plan


def plan_spec(
    body: bytes, content_type: str, spec: AblationSpec, calibrations: Callable[[], Sequence[Calibration]]
) -> PlannedSpec:
    """Return the plan of `spec`, parsed from `body`; `blocks: auto` becomes what it needs.

    - Statistics need enough blocks to prove a gain of `adopt_if` beyond the margin with the power of a planned design,
      at the upper bound of the noise of the noisiest device in `calibrations`. Four looks may end it earlier.
    - An exact metric needs two blocks per seed.
    - A calibration needs the number that calibrates a device.

    Raises SpecError with all problems of the plan, or if the noise is unknown or no allowed number is enough.
    """
    if not spec.design.blocks.auto:
        return PlannedSpec(body, content_type, spec, make_plan(spec))
    values, seeds = load_values(body, content_type), spec.design.num_seeds
    spec = _with_looks(values, max(MIN_BLOCKS, 2 * seeds))  # enough to plan its arms
    events = blocks_for_rarest_event(spec)
    if events is not None and events > spec.design.blocks.number:
        spec = _with_looks(values, min(events, MAX_BLOCKS))
    plan = None
    if (fixed := _fixed_number(spec)) is not None:
        number, why = fixed
        spec = _with_looks(values, number)
    else:
        plan, noise = make_plan(spec), calibrations()
        for _ in range(PASSES):
            number, why = _number(spec, size_of(spec, plan, noise))
            spec = _with_looks(values, *looks_up_to(number, first=events or MIN_BLOCKS))
    text = f"# blocks: auto gave {number}: {why}\n".encode() + spec_yaml(values)
    return PlannedSpec(text, CONTENT_TYPE, spec, make_plan(spec) if plan is None else replan(spec, plan))


PASSES = 3
"""Times that a number of blocks is computed: the level of its last look depends on the looks."""
LOOKS = 4
"""Looks of a design by `auto`, as far apart as the smallest number of blocks allows."""


def looks_up_to(blocks: int, *, first: int = MIN_BLOCKS) -> list[int]:
    """Return the numbers of blocks at which a design of at most so many may answer."""
    return sorted({max(first, math.ceil(blocks * part / LOOKS)) for part in range(1, LOOKS + 1)})


def _with_looks(values: dict[str, Any], *looks: int) -> AblationSpec:
    """Set the numbers of blocks in `values`; return their spec."""
    values["design"]["blocks"] = {"looks": list(looks)} if len(looks) > 1 else {"count": looks[0]}
    return spec_of(values)


def _fixed_number(spec: AblationSpec) -> tuple[int, str] | None:
    """Return a number that does not depend on noise, and why; None for one that does."""
    if spec.purpose == "calibration":
        return ADMITTING_BLOCKS, "this number calibrates a device"
    if spec.verdict.primary.over_seeds or spec.verdict.primary.metric not in METRICS:
        detail = f"blocks: auto knows the noise of runs, not how '{spec.verdict.primary.metric}' differs between seeds"
        hint = "give a number, such as {count: 12} with seeds: 12; the verdict says how many seeds would answer"
        raise SpecError([SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=hint)])
    if spec.verdict.primary.exact:
        return max(MIN_EXACT_BLOCKS, 2 * spec.design.num_seeds), "every seed runs twice, to prove the metric exact"
    return None


def repeats_exactly(spec: AblationSpec, plan: Plan, calibrations: Sequence[Calibration]) -> bool:
    """Return whether enough A/A blocks like those of `plan` show that its primary metric repeats bit for bit."""
    own = workload_of(plan, spec)
    alike = [one for one in calibrations if one.key.workload == own and one.blocks >= MIN_BLOCKS]
    return any(one.bit_repeatable for one in alike)


def _number(spec: AblationSpec, sizing: Sizing | None) -> tuple[int, str]:
    if sizing is None:
        raise SpecError([unsized(spec)])
    if sizing.blocks_needed is None:
        beyond = f"a gain of {sizing.aim_pct:g} % beyond the margin of {spec.verdict.primary.margin_pct:g} %"
        detail = f"no allowed number of blocks proves {beyond}: {noise_of(spec, sizing)}"
        raise SpecError([SpecProblem(pointer=pointer("design", "blocks"), detail=detail, hint=FEWER_BLOCKS)])
    of_losses = any(one.not_worse_by and one.metric in LOSS_METRICS for one in spec.verdict.require)
    seeds = spec.design.num_seeds if of_losses else 0
    noise = f"sd of d at most {sizing.sd_upper_pct:.2f} % ({sizing.calibration})"
    beyond = f"beyond the margin of {spec.verdict.primary.margin_pct:g} %"
    events = blocks_for_rarest_event(spec)
    if events is not None and events > max(sizing.blocks_needed, seeds):
        return events, f"verdict.rarest_event {show_percent(spec.verdict.rarest_event or 0.0)} needs so many"
    return max(sizing.blocks_needed, seeds), f"{noise}, to prove a gain of {sizing.aim_pct:g} % {beyond}"


def size_of(spec: AblationSpec, plan: Plan, calibrations: Sequence[Calibration], *, asking: int = 1) -> Sizing | None:
    """Return the effect that `plan` can detect at this asking of its questions.

    None if the noise is unknown or the metric has none.
    """
    if not calibrations:
        return None
    own = workload_of(plan, spec)
    alike = [one for one in calibrations if one.key.workload == own and one.blocks >= ADMITTING_BLOCKS and one.sd_pct]
    if not alike or spec.verdict.primary.exact or spec.verdict.primary.over_seeds or spec.purpose == "calibration":
        return None
    noisiest = max(alike, key=lambda one: one.sd_upper_pct)
    wider = partial(widening, strength_of(dependence_of(alike)))
    noise = _Noise(
        sd_pct=noisiest.sd_pct, sd_upper_pct=noisiest.sd_upper_pct, scale=RATIO, widening=wider, most=MAX_BLOCKS
    )
    sized = _sized(spec, plan, spec.verdict.primary, len(plan.blocks), noise, asking=asking)
    return Sizing(calibration=noisiest.digest, **sized)


@dataclass(frozen=True, kw_only=True)
class SeedSpread:
    """How far the differences of a loss between two arms were apart over the seeds of an earlier ablation."""

    ablation: str
    """Its name."""
    seeds: int
    sd_pct: float
    """Standard deviation of the differences, in percent of `baseline`."""
    baseline: float
    """Mean of the baseline, in the metric's unit."""

    @property
    def sd_upper_pct(self) -> float:
        """Upper 95 % bound of the standard deviation."""
        return self.sd_pct * upper_factor(self.seeds)


def spreads_in(ablation: str, verdict: Verdict, metric: str) -> Iterator[SeedSpread]:
    """Yield the spread of each variant of an ablation that `metric`, a loss, decided."""
    for variant in verdict.variants:
        one = variant.primary
        if one is not None and one.metric == metric and one.baseline is not None and one.sd_pct > 0:
            yield SeedSpread(ablation=ablation, seeds=one.blocks, sd_pct=one.sd_pct, baseline=one.baseline)


def size_by_seeds(spec: AblationSpec, plan: Plan, spreads: Sequence[SeedSpread], *, asking: int = 1) -> Sizing | None:
    """Return the difference of a loss that the seeds of `plan` can detect; None without earlier ablations.

    A new variant may differ from the baseline by more or less than earlier ones did; the widest of `spreads` counts.
    """
    if not spreads or not spec.verdict.primary.over_seeds or spec.purpose == "calibration":
        return None
    widest = max(spreads, key=lambda one: one.sd_upper_pct)
    primary = spec.verdict.primary.in_percent(unit_of_shares(widest.baseline))
    noise = _Noise(
        sd_pct=widest.sd_pct,
        sd_upper_pct=widest.sd_upper_pct,
        scale=SHARE,
        widening=lambda _seeds: 1.0,
        most=MAX_SEEDS,
    )
    sized = _sized(spec, plan, primary, len({block.seed for block in plan.blocks}), noise, asking=asking)
    return Sizing(calibration=None, earlier=widest.ablation, baseline=widest.baseline, **sized)


@dataclass(frozen=True, kw_only=True)
class _Noise:
    sd_pct: float
    sd_upper_pct: float
    scale: Scale
    widening: Callable[[int], float]
    most: int
    """Largest allowed number of blocks, or of seeds."""


def _sized(
    spec: AblationSpec, plan: Plan, primary: Primary, number: int, noise: _Noise, *, asking: int
) -> dict[str, Any]:
    """Return what `number` blocks or seeds detect, prove and adopt, and the number that is needed."""
    whole, sd = spec.verdict.level_of(asking) / len(plan.variants), noise.sd_upper_pct / 100
    level = spec.design.blocks.last_look.level(whole)
    amounts = (primary.margin_pct, primary.threshold_pct, _aim_pct(primary))
    margin, threshold, aim = (noise.scale.natural(pct) for pct in amounts)
    widened = noise.widening(number) * sd
    detected = detectable_per_sd(number, level=level) * widened
    adopted = adopted_from(number, widened, margin=margin, threshold=threshold, level=level)
    needed = blocks_to_detect(
        aim - margin, sd, minimum=MIN_BLOCKS, level=level, power=PLANNED_POWER, widening=noise.widening
    )
    return {
        "sd_upper_pct": noise.sd_upper_pct,
        "mde_pct": noise.scale.percent(detected),
        "proved_pct": noise.scale.percent(margin + detected),
        "adopted_pct": noise.scale.percent(adopted),
        "adopt_if_pct": primary.threshold_pct,
        "aim_pct": _aim_pct(primary),
        "blocks_needed": needed if needed is not None and needed <= noise.most else None,
        "expected": _expected(spec.design.blocks.schedule, noise, margin=margin, level=whole),
    }


CHANGES_PCT = (1.0, 2.0, 5.0)
"""True changes for which a design with looks says its expected number of blocks."""
_RUNS = 2000


def _expected(looks: tuple[int, ...], noise: _Noise, *, margin: float, level: float) -> tuple[ExpectedBlocks, ...]:
    """Return the mean blocks of a design with looks until one variant is proved beyond the margin or within it."""
    if len(looks) == 1:
        return ()
    sizes = np.array(looks, dtype=np.float64)
    sums = np.random.default_rng(0).normal(size=(_RUNS, sizes.size)) * np.sqrt(np.diff(sizes, prepend=0.0))
    errors = noise.sd_pct / 100 * np.array([noise.widening(look) for look in looks]) / np.sqrt(sizes)
    levels = np.array([Look(looks, number).level(level) for number in range(sizes.size)])
    reach = special.stdtrit(sizes - 2, 1 - levels / 2) * errors
    means = np.cumsum(sums, axis=1) / np.sqrt(sizes) * errors
    return tuple(
        ExpectedBlocks(change_pct=change, blocks=_mean_end(sizes, noise.scale.natural(change) + means, reach, margin))
        for change in CHANGES_PCT
    )


def _mean_end(sizes: Array, estimates: Array, reach: Array, margin: float) -> float:
    """Return the mean size of the first look whose interval lies beyond the margin or within it."""
    answers = (np.abs(estimates) - reach > margin) | (np.abs(estimates) + reach < margin)
    answers[:, -1] = True
    return float(sizes[np.argmax(answers, axis=1)].mean())


def _aim_pct(primary: Primary) -> float:
    """Return the gain that a design must prove to be beyond the margin. None is proved that is at the margin."""
    margin, threshold = primary.margin_pct, primary.threshold_pct
    return threshold if threshold > margin else 2 * margin


def _twice(sizing: Sizing) -> str:
    """Return the gain that the blocks are for, where the threshold is not above the margin."""
    return "" if sizing.aim_pct == sizing.adopt_if_pct else f", so they are for {sizing.aim_pct:g} %"


def noise_of(spec: AblationSpec, sizing: Sizing) -> str:
    """Return the noise behind a number of blocks as text."""
    noise = f"neighbouring trials there have a standard deviation of up to {sizing.sd_upper_pct:.2f} %"
    return f"{noise}, over windows of {spec.workload.steps.timed:,} timed steps"


def sizing_problems(spec: AblationSpec, sizing: Sizing | None) -> list[SpecProblem]:
    """Return the problem of a design that cannot prove the gain from which its own rule adopts."""
    over_seeds = spec.verdict.primary.over_seeds  # of other variants, so no reason to refuse
    checked = spec.verdict.primary.adopt_if is not None and not spec.design.underpowered and not over_seeds
    if sizing is None or not checked or sizing.proved_pct <= sizing.aim_pct:
        return []
    needed = sizing.blocks_needed
    margin = f"the margin of {spec.verdict.primary.margin_pct:g} %"
    detail = (
        f"{spec.design.blocks.number} blocks prove a gain of {sizing.proved_pct:.2f} % to be beyond {margin} at the "
        f"measured noise, but the rule adopts from {sizing.adopt_if_pct:g} %{_twice(sizing)}: {noise_of(spec, sizing)}"
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
        f"limits.device_minutes allows {allowed:g}: {noise_of(spec, sizing)}, and a gain of {sizing.aim_pct:g} % "
        f"must be proved beyond the margin of {spec.verdict.primary.margin_pct:g} %"
    )
    return [SpecProblem(pointer=pointer("limits", "device_minutes"), detail=detail, hint=FEWER_BLOCKS)]


def workload_of(plan: Plan, spec: AblationSpec) -> str:
    """Return the digest that a calibration must have to size `plan`, on any device and with any code."""
    config, recipe = plan.baseline.config, spec.workload.name
    estimator = estimator_digest(config, spec.verdict.primary.metric)
    return workload_digest(plan.node_class, recipe, shape_digest(config), estimator)
