"""The `require` entries of a rule beside the primary metric. Missing data fails.

A budget holds in every block. What differs from run to run needs a test: without evidence a requirement is neither met
nor broken, and nothing is adopted.
"""

import math
from collections.abc import Sequence
from typing import Literal

from ablate.experiments.analysis.answer import bad_runs
from ablate.experiments.analysis.comparing import Sample, paired_sample, sample_of
from ablate.experiments.analysis.curves import off_the_curves
from ablate.experiments.analysis.declared import no_ratio, repeated_seeds
from ablate.experiments.analysis.evidence import Evidence, Pair
from ablate.experiments.analysis.statistics import Fit
from ablate.experiments.analysis.verdicts import RequirementResult, unit_of_shares
from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.checks import is_resident
from ablate.experiments.design.metrics import METRICS, SEED_METRICS, TIMED_METRICS, find_metric
from ablate.experiments.design.power import MAX_BLOCKS, POWER, blocks_to_detect
from ablate.experiments.design.spec_values import Difference
from ablate.experiments.design.verdict_rule import Requirement
from ablate.experiments.records.receipts import read_metric
from ablate.kernels.backends import NodeClass
from ablate.model.measurements import Metric


def judge_requirement(
    requirement: Requirement,
    evidence: Evidence,
    node_class: NodeClass,
    level: float,
    *,
    uncalibrated: str | None = None,
    dependence: float = 0.0,
    lost: int = 0,
) -> RequirementResult:
    """Return whether the variant meets `requirement` on `node_class`, with the deciding number.

    `level` is that of one-sided tests, which `dependence` widens. `uncalibrated` is why speeds prove nothing on the
    device, and `lost` how many trials were cut short.
    """
    if requirement.not_worse_by is not None:
        return _judge_by_test(requirement, requirement.not_worse_by, evidence, level, uncalibrated, dependence, lost)
    metric = METRICS[requirement.metric]
    every = [(read_metric(metric, pair.variant), read_metric(metric, pair.baseline)) for pair in evidence.pairs]
    values = [(own, other) for own, other in every if own is not None and other is not None]
    passed: bool | None
    if not values or len(values) < len(every):
        passed, detail = None, f"missing in {len(every) - len(values)} of {len(every)} blocks"
    else:
        passed, detail = within_bound(requirement, values) or _identical(evidence.pairs, metric)
    without_noise = metric.kind == "absolute" and metric.decides == "exact"
    exact = requirement.rule == "identical" or (without_noise and not is_resident(requirement.metric, node_class))
    return result_of(requirement, passed, detail, exact=passed is not None and exact)


def _judge_by_test(
    requirement: Requirement,
    bound: Difference,
    evidence: Evidence,
    level: float,
    uncalibrated: str | None,
    dependence: float,
    lost: int,
) -> RequirementResult:
    name = requirement.metric
    relative = bound.relative or name in SEED_METRICS
    sample = sample_of(evidence, name, requirement.target) if relative else paired_sample(evidence, name)
    off = off_the_curves(evidence, name, requirement.target)
    if sample is None and off is not None:
        return result_of(requirement, None, off)
    if sample is None:
        seeds = len({pair.seed for pair in evidence.pairs})
        few = f"{seeds} seeds" if name in SEED_METRICS else f"{len(evidence.pairs)} blocks"
        return result_of(requirement, None, no_ratio(evidence, name) or f"{few} with this number are too few")
    metric = find_metric(name, evidence.arm.config.declared)
    better = (metric and metric.better) or "lower"
    lost = lost if name in TIMED_METRICS else 0
    passed, detail = proved(sample, bound, better, level, metric=name, dependence=dependence, lost=lost)
    if off is not None:
        detail = off if passed is None else f"{detail}; {off}: runs without the number count at their end"
    blind = repeated_seeds(evidence, name) or (uncalibrated if name in TIMED_METRICS else None)
    return result_of(requirement, None, f"{detail}; {blind}") if blind else result_of(requirement, passed, detail)


def result_of(requirement: Requirement, passed: bool | None, detail: str, *, exact: bool = False) -> RequirementResult:
    """Return the result of a requirement; `passed` is None without proof."""
    return RequirementResult(
        metric=requirement.metric,
        rule=rule_text(requirement),
        passed=passed is True,
        undecided=passed is None,
        detail=detail,
        exact=exact,
    )


def proved(
    sample: Sample,
    bound: Difference,
    better: Literal["higher", "lower"],
    level: float,
    *,
    metric: str,
    dependence: float = 0.0,
    lost: int = 0,
) -> tuple[bool | None, str]:
    """Judge by one-sided t tests at `level` whether the variant is worse by less than `bound`, or by more.

    `dependence` widens them. A proof must hold with `lost` more trials at their worst.
    Returns (True or False, numbers), and (None, numbers with the need of blocks or seeds) without proof of either.
    """
    unit, widening, limit = _unit(metric), sample.widening(dependence), _natural(sample, bound, better)
    fitted = sample.fit().widened(widening)
    within, beyond = (-math.inf, limit), (limit, math.inf)
    if better == "higher":
        within, beyond = (limit, math.inf), (-math.inf, limit)
    change = _change(sample, bound, float(fitted.mean), unit)
    of = "blocks" if sample.baseline is None else "seeds"
    numbers = f"{change} over {fitted.blocks} {of}"
    p_met, p_broken = (
        float(fitted.p_same(*side)) if sample.proves(sign) else 1.0 for side, sign in ((within, -1), (beyond, 1))
    )
    worst = [float(one.fit().widened(widening).p_same(*within)) for one in sample.with_lost(lost)]
    if p_met <= level < max(worst, default=0.0):
        trials = "a trial" if lost == 1 else f"{lost} trials"
        return None, f"{numbers}: not proved if {trials} that ended early took twice the time of the slowest"
    if p_met <= level:
        return True, f"{numbers}: proved to be worse by less (p {p_met:.2g}); {bad_runs(fitted.blocks, of)}"
    if p_broken <= level:
        return False, f"{numbers}: proved to be worse by more (p {p_broken:.2g})"
    needed = _needed(fitted, abs(limit), level, widening)
    enough = f"more than {MAX_BLOCKS:,}" if needed is None else f"about {needed:,}"
    scatter = _change(sample, bound, float(fitted.sd), unit).lstrip("+")
    detail = f"differences scatter by {scatter}, and {enough} {of} would prove a variant without a change"
    return None, f"{numbers}: neither proved nor disproved (p {p_met:.2g} and {p_broken:.2g}); {detail}"


def _needed(fitted: Fit, distance: float, level: float, widening: float) -> int | None:
    """Return the number of samples that proves an unchanged variant with 80 % power."""
    return blocks_to_detect(distance, float(fitted.sd) * widening, minimum=fitted.blocks, level=2 * level, power=POWER)


def _natural(sample: Sample, bound: Difference, better: str) -> float:
    """Return the bound as a difference of `sample`, with the sign of a change for the worse."""
    sign = -1 if better == "higher" else 1
    if bound.relative:
        return sample.scale.natural(sign * bound.value)
    return sign * bound.value / unit_of_shares(sample.baseline)


def _change(sample: Sample, bound: Difference, difference: float, unit: str) -> str:
    if bound.relative:
        return f"{sample.scale.percent(difference):+.2f} %"
    return f"{difference * unit_of_shares(sample.baseline):+.4g} {unit}".rstrip()


def _unit(name: str) -> str:
    return METRICS[name].unit if name in METRICS else ""


def within_bound(requirement: Requirement, values: Sequence[tuple[float, float]]) -> tuple[bool, str] | None:
    """Return whether (variant, baseline) keep the requirement's bound, with the number; None if it has no bound."""
    unit = METRICS[requirement.metric].unit
    if requirement.max_value is not None:
        most = max(own for own, _ in values)
        return most <= requirement.max_value, f"at most {most:.4g} {unit}"
    if requirement.max_delta is not None:
        rise = max(own - other for own, other in values)
        return rise <= requirement.max_delta, f"largest change {rise:+.4g} {unit}"
    return None


def rule_text(requirement: Requirement) -> str:
    """Return the rule with its bound, for example "max_delta 6 GiB" or "identical"."""
    unit = _unit(requirement.metric)
    if requirement.not_worse_by is not None:
        bound = requirement.not_worse_by
        text = f"worse by less than {bound.value:g} {'%' if bound.relative else bound.unit or unit}".rstrip()
        return text if requirement.target is None else f"{text}, to {requirement.target}"
    if requirement.max_value is not None:
        return f"max_value {requirement.max_value:g} {unit}"
    if requirement.max_delta is not None:
        return f"max_delta {requirement.max_delta:g} {unit}"
    return str(requirement.rule)


def _identical(pairs: Sequence[Pair], metric: Metric) -> tuple[bool, str]:
    other = [pair for pair in pairs if read_metric(metric, pair.variant) != read_metric(metric, pair.baseline)]
    if not other:
        return True, f"bit-identical in {len(pairs)} blocks"
    first = other[0]
    values = f"{read_metric(metric, first.variant)!r} against {read_metric(metric, first.baseline)!r}"
    return False, f"differs in {len(other)} of {len(pairs)} blocks, first in {block_name(first.block_index)}: {values}"
