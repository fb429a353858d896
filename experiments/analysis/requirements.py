"""Judge the `require` entries of a rule: memory and loss budgets beside the primary metric. Missing data fails."""

from collections.abc import Sequence

from experiments.analysis.evidence import Evidence, Pair
from experiments.analysis.verdicts import RequirementResult
from experiments.block_numbers import block_name
from experiments.design.gates import Claim
from experiments.design.metrics import METRICS, Metric
from experiments.design.spec import Requirement
from experiments.records.receipts import Receipt, read_metric


def judge_requirement(requirement: Requirement, evidence: Evidence) -> RequirementResult:
    """Return whether the variant meets `requirement` in every block, with the number that decided."""
    metric = METRICS[requirement.metric]
    values = [(read_metric(metric, pair.variant), read_metric(metric, pair.baseline)) for pair in evidence.pairs]
    known = [(own, other) for own, other in values if own is not None and other is not None]
    if not known or len(known) < len(values):
        passed, detail = False, f"missing in {len(values) - len(known)} of {len(values)} blocks"
    elif requirement.max_value is not None:
        most = max(own for own, _ in known)
        passed, detail = most <= requirement.max_value, f"at most {most:.4g} {metric.unit}"
    elif requirement.max_delta is not None:
        rise = max(own - other for own, other in known)
        passed, detail = rise <= requirement.max_delta, f"largest change {rise:+.4g} {metric.unit}"
    else:
        passed, detail = _loss(requirement, evidence, metric)
    return RequirementResult(
        metric=requirement.metric, rule=_in_words(requirement, metric), passed=passed, detail=detail
    )


def _in_words(requirement: Requirement, metric: Metric) -> str:
    if requirement.max_value is not None:
        return f"max_value {requirement.max_value:g} {metric.unit}"
    if requirement.max_delta is not None:
        return f"max_delta {requirement.max_delta:g} {metric.unit}"
    return str(requirement.rule)


def _loss(requirement: Requirement, evidence: Evidence, metric: Metric) -> tuple[bool, str]:
    rule = requirement.rule
    if rule == "as_claimed" and evidence.claim is Claim.CHANGES_MODEL:
        return True, "the gates claim another numerical model; losses are not compared"
    if rule == "as_claimed" and evidence.claim is Claim.SCHEDULE_ONLY and requirement.metric == "loss_step1":
        rule = "identical"
    return _identical(evidence.pairs, metric) if rule == "identical" else _envelope(requirement, evidence.pairs, metric)


def _identical(pairs: Sequence[Pair], metric: Metric) -> tuple[bool, str]:
    other = [pair for pair in pairs if read_metric(metric, pair.variant) != read_metric(metric, pair.baseline)]
    if not other:
        return True, f"bit-identical in {len(pairs)} blocks"
    first = other[0]
    values = f"{read_metric(metric, first.variant)!r} against {read_metric(metric, first.baseline)!r}"
    return False, f"differs in {len(other)} of {len(pairs)} blocks, first in {block_name(first.block_index)}: {values}"


def _envelope(requirement: Requirement, pairs: Sequence[Pair], metric: Metric) -> tuple[bool, str]:
    """Compare |variant - baseline| with the spread of baseline repeats of the same seed, at least the tolerance."""
    spreads: dict[int, list[float]] = {}
    for pair in pairs:
        spreads.setdefault(pair.seed, []).append(_value(metric, pair.baseline))
    alone = sorted(seed for seed, values in spreads.items() if len(values) < 2)
    if alone:
        return False, f"seed {alone[0]} has no repeat of the baseline to compare with"
    limits = {seed: max(max(values) - min(values), requirement.tolerance) for seed, values in spreads.items()}
    gaps = [(abs(_value(metric, p.variant) - _value(metric, p.baseline)), limits[p.seed], p) for p in pairs]
    gap, limit, worst = max(gaps, key=lambda entry: entry[0] - entry[1])
    where = f"{block_name(worst.block_index)}, seed {worst.seed}"
    return gap <= limit, f"{gap:.3g} {metric.unit} apart in {where}; envelope {limit:.3g} {metric.unit}"


def _value(metric: Metric, receipt: Receipt) -> float:
    value = read_metric(metric, receipt)
    if value is None:
        raise AssertionError("the caller checked that no value is missing")
    return value
