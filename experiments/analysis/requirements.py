"""The `require` entries of a rule: memory and loss budgets beside the primary metric. Missing data fails."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import scipy

from experiments.analysis.comparing import sample_of
from experiments.analysis.declared import no_ratio, one_value
from experiments.analysis.evidence import Evidence, Pair
from experiments.analysis.statistics import fit, log_ratio, percent
from experiments.analysis.verdicts import RequirementResult
from experiments.block_numbers import block_name
from experiments.design.gate import Claim
from experiments.design.metrics import METRICS, find_metric
from experiments.design.plan import is_resident
from experiments.design.spec import Requirement
from experiments.records.receipts import Receipt, read_metric
from kernels.backends import NodeClass
from model.measurements import Metric

ENVELOPE_LEVEL = 0.05
"""Chance per ablation that a variant with the baseline's losses leaves the envelope in some block."""


def judge_requirement(
    requirement: Requirement, evidence: Evidence, node_class: NodeClass, level: float
) -> RequirementResult:
    """Return whether the variant meets `requirement` in every block on `node_class`, with the deciding number.

    A margin is met if a one-sided test at `level` over the blocks proves it.
    """
    if requirement.margin is not None:
        return _judge_margin(requirement, requirement.margin, evidence, level)
    metric = METRICS[requirement.metric]
    every = [(read_metric(metric, pair.variant), read_metric(metric, pair.baseline)) for pair in evidence.pairs]
    values = [(own, other) for own, other in every if own is not None and other is not None]
    rule = _rule(requirement, evidence)
    complete = bool(values) and len(values) == len(every)
    passed: bool | None
    if not complete:
        passed, detail = None, f"missing in {len(every) - len(values)} of {len(every)} blocks"
    else:
        passed, detail = within_bound(requirement, values) or _loss(rule, requirement, evidence.pairs)
    without_noise = metric.kind == "absolute" and metric.decides == "exact"
    exact = rule == "identical" or (without_noise and not is_resident(requirement.metric, node_class))
    return RequirementResult(
        metric=requirement.metric,
        rule=rule_text(requirement),
        passed=passed is True,
        undecided=passed is None,
        detail=detail,
        exact=passed is not None and exact,
        compared=requirement.rule != "as_claimed" or rule is not None,
    )


def _judge_margin(requirement: Requirement, margin_pct: float, evidence: Evidence, level: float) -> RequirementResult:
    """Judge by Student's t over the block differences that the variant is worse by less than the margin."""
    name, config = requirement.metric, evidence.arm.config
    fields: dict[str, Any] = {"metric": name, "rule": rule_text(requirement), "exact": False}
    sample = sample_of(evidence, name)
    if sample is None:
        why = no_ratio(evidence, name) or f"{len(evidence.pairs)} blocks with this number are too few"
        return RequirementResult(**fields, passed=False, undecided=True, detail=why)
    fitted, (low, high) = fit(sample.differences, sample.places), (log_ratio(-margin_pct), log_ratio(margin_pct))
    by = f"{percent(float(fitted.mean)):+.2f} % over {fitted.blocks} blocks"
    if alone := one_value(evidence, name):
        return RequirementResult(**fields, passed=False, undecided=True, detail=f"{by}: {alone}")
    within, beyond = (low, math.inf), (-math.inf, low)
    if find_metric(name, config).better == "lower":
        within, beyond = (-math.inf, high), (high, math.inf)
    p_met, p_broken = (float(fitted.p_same(*side)) for side in (within, beyond))
    if p_met <= level:
        return RequirementResult(**fields, passed=True, detail=f"{by}: proved to be worse by less (p {p_met:.2g})")
    if p_broken <= level:
        return RequirementResult(**fields, passed=False, detail=f"{by}: proved to be worse by more (p {p_broken:.2g})")
    detail = f"{by}: neither proved nor disproved (p {p_met:.2g} and {p_broken:.2g})"
    return RequirementResult(**fields, passed=False, undecided=True, detail=detail)


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
    if requirement.margin is not None:
        return f"worse by less than {requirement.margin:g} %"
    unit = METRICS[requirement.metric].unit
    if requirement.max_value is not None:
        return f"max_value {requirement.max_value:g} {unit}"
    if requirement.max_delta is not None:
        return f"max_delta {requirement.max_delta:g} {unit}"
    return str(requirement.rule)


def _rule(requirement: Requirement, evidence: Evidence) -> str | None:
    """Return how losses are compared, with `as_claimed` resolved by the gates' claim; None for another model."""
    if requirement.rule != "as_claimed":
        return requirement.rule
    if evidence.claim is Claim.CHANGES_MODEL:
        return None
    return "identical" if evidence.claim is Claim.SCHEDULE_ONLY and requirement.metric == "loss_step1" else "envelope"


def _loss(rule: str | None, requirement: Requirement, pairs: Sequence[Pair]) -> tuple[bool | None, str]:
    metric = METRICS[requirement.metric]
    if rule is None:
        return True, "the gates claim another numerical model; losses are not compared"
    return _identical(pairs, metric) if rule == "identical" else _envelope(requirement, pairs, metric)


def _identical(pairs: Sequence[Pair], metric: Metric) -> tuple[bool, str]:
    other = [pair for pair in pairs if read_metric(metric, pair.variant) != read_metric(metric, pair.baseline)]
    if not other:
        return True, f"bit-identical in {len(pairs)} blocks"
    first = other[0]
    values = f"{read_metric(metric, first.variant)!r} against {read_metric(metric, first.baseline)!r}"
    return False, f"differs in {len(other)} of {len(pairs)} blocks, first in {block_name(first.block_index)}: {values}"


def _envelope(requirement: Requirement, pairs: Sequence[Pair], metric: Metric) -> tuple[bool | None, str]:
    """Compare the variant's losses with the prediction intervals of the baseline's repeats of the same seed."""
    repeats: dict[int, list[float]] = {}
    for pair in pairs:
        repeats.setdefault(pair.seed, []).append(_value(metric, pair.baseline))
    alone = sorted(seed for seed, values in repeats.items() if len(values) < 2)
    if alone:
        return None, f"seed {alone[0]} has no repeat of the baseline to compare with"
    limits = {seed: max(limit, requirement.tolerance) for seed, limit in envelopes(repeats).items()}
    means = {seed: statistics.fmean(values) for seed, values in repeats.items()}
    gaps = [(abs(_value(metric, pair.variant) - means[pair.seed]), limits[pair.seed], pair) for pair in pairs]
    gap, limit, worst = max(gaps, key=lambda entry: entry[0] - entry[1])
    where = f"{block_name(worst.block_index)}, seed {worst.seed}"
    return gap <= limit, f"{gap:.3g} {metric.unit} from the baseline in {where}; envelope {limit:.3g} {metric.unit}"


def envelopes(repeats: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return by seed the largest allowed distance of a loss from the mean of the baseline's repeats.

    Half width of prediction intervals by Student's t, from the spread within seeds, pooled. The level is split over all
    blocks (Bonferroni): losses with only the baseline's noise leave some interval in at most 5 % of ablations.
    """
    blocks = sum(len(values) for values in repeats.values())
    freedom = blocks - len(repeats)
    squares = math.fsum((len(values) - 1) * statistics.variance(values) for values in repeats.values())
    reach = float(scipy.special.stdtrit(freedom, 1 - ENVELOPE_LEVEL / (2 * blocks))) * math.sqrt(squares / freedom)
    return {seed: reach * math.sqrt(1 + 1 / len(values)) for seed, values in repeats.items()}


def _value(metric: Metric, receipt: Receipt) -> float:
    value = read_metric(metric, receipt)
    if value is None:
        raise AssertionError("the caller checked that no value is missing")
    return value
