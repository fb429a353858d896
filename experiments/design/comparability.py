"""Whether a metric may compare two arms at all, and which comparison would be fair.

An arm that does half the work of a step needs less memory and less time for it, which is no improvement. An arm that
trains on twice the tokens has a lower loss, which is none either. Arms can have equal tokens, model FLOPs, parameters
or times; a refusal names the comparison that would be fair.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ablate.experiments.design.arms import Arm
from ablate.experiments.design.gate import Claim, show
from ablate.experiments.design.kinds.kind import ArmConfig, StepWork
from ablate.experiments.design.problems import pointer
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.verdict_rule import Requirement
from ablate.experiments.errors import SpecProblem
from ablate.model.measurements import Metric

MOST_APART = 0.001
"""Largest relative difference of FLOPs that count as equal, because a run has whole steps."""
LOSSES_OF_STEPS = ("loss_step1", "loss_final")
"""Losses over training rows; all others are over validation rows."""


class Unlike(NamedTuple):
    """Why a metric does not compare two arms."""

    why: str
    """How the work of the variant differs."""
    fair: str
    """The comparisons that would be fair."""


def unlike(metric: Metric, own: ArmConfig, base: ArmConfig, *, equal: str) -> Unlike | None:
    """Say how two arms' configurations differ in something that `metric` counts; None if they do not.

    `equal` is `workload.steps.equal`. With equal parameters the FLOPs of a token may differ. None too where only the
    receipts have the work (`ablate.experiments.analysis.programs.other_tokens`).
    """
    if metric.decides == "curve":  # equal tokens, or equal seconds, are on the curves
        return _other_rows(metric, own, base)
    if metric.kind == "loss":
        return _other_rows(metric, own, base) or _other_total(own, base)
    return _other_tokens(metric, own, base) or (None if equal == "parameters" else _other_flops(metric, own, base))


def other_work(metric: Metric, own: ArmConfig, base: ArmConfig, *, equal: str) -> str | None:
    """Say how the work of two arms' configurations differs in what `metric` counts; None if it does not."""
    difference = unlike(metric, own, base, equal=equal)
    return difference and difference.why


def _other_tokens(metric: Metric, own: ArmConfig, base: ArmConfig) -> Unlike | None:
    mine, theirs = own.work, base.work
    if metric.alike != "step" or mine is None or theirs is None or mine.tokens == theirs.tokens:
        return None
    fair = "decide by tokens_per_s, or let steps have equal tokens (micro_batch x seq_len)"
    return Unlike(f"a step has {mine.tokens:,} tokens, the baseline's {theirs.tokens:,}", fair)


def _other_flops(metric: Metric, own: ArmConfig, base: ArmConfig) -> Unlike | None:
    mine, theirs = own.work, base.work
    if metric.alike == "nothing" or mine is None or theirs is None:
        return None
    if mine.flops * theirs.tokens == theirs.flops * mine.tokens:
        return None
    per_token = (f"{work.flops / work.tokens:,.0f}" for work in (mine, theirs))
    fair = (
        "equal parameters (workload.steps.equal: parameters); equal FLOPs: decide by model_tflops_per_s; equal tokens: "
        "by a loss, and require tokens_per_s"
    )
    return Unlike("a token takes {} model FLOPs, the baseline's {}".format(*per_token), fair)


def _other_rows(metric: Metric, own: ArmConfig, base: ArmConfig) -> Unlike | None:
    """Say how the rows differ over which a loss is a mean."""
    of_validation = metric.name not in LOSSES_OF_STEPS
    mine, theirs = ((rows.validation if of_validation else rows.training) for rows in (own.rows, base.rows))
    name = next((name for name in mine if name in theirs and mine[name] != theirs[name]), None)
    if name is None:
        return None
    which, fair = "training", "decide by loss_val after equal tokens, over rows that all arms share"
    if of_validation:
        which, fair = "validation", f"equal validation rows: one {name} for all arms"
    return Unlike(f"its {which} rows are others: {name} {show(mine[name])} instead of {show(theirs[name])}", fair)


def _other_total(own: ArmConfig, base: ArmConfig) -> Unlike | None:
    mine, theirs = trained(own), trained(base)
    if mine is None or theirs is None or mine.tokens == theirs.tokens or equal_flops(mine.flops, theirs.flops):
        return None
    why = f"it trains on {mine.tokens:,} tokens, the baseline on {theirs.tokens:,}"
    fair = "equal tokens (workload.steps.equal: tokens), equal FLOPs (equal: flops), or equal time (loss_val_at_time)"
    return Unlike(why, f"after {fair}")


def trained(config: ArmConfig) -> StepWork | None:
    """Return the work of all steps of an arm; None where only the receipts have it."""
    work, steps = config.work, config.steps.total
    return None if work is None else StepWork(tokens=work.tokens * steps, flops=work.flops * steps)


def equal_flops(own: int, base: int) -> bool:
    """Return whether two numbers of model FLOPs count as equal."""
    return abs(own - base) <= MOST_APART * base


def comparison_problems(spec: AblationSpec, arms: Sequence[Arm]) -> Iterator[SpecProblem]:
    """Find metrics of the rule that do not compare a variant with the baseline, which is the first arm."""
    names: dict[tuple[str | int, ...], tuple[str, Requirement | None]] = {
        ("verdict", "primary", "metric"): (spec.verdict.primary.metric, None)
    }
    names |= {("verdict", "require", n, "metric"): (one.metric, one) for n, one in enumerate(spec.verdict.require)}
    for place, (name, requirement) in names.items():
        for arm in arms[1:]:
            difference = _unlike_by(spec, name, requirement, arm.config, arms[0].config)
            if difference is not None:
                detail = f"'{name}' does not compare variant '{arm.name}' with the baseline: {difference.why}"
                yield SpecProblem(pointer=pointer(*place), detail=detail, hint=f"fair: {difference.fair}")


def _unlike_by(
    spec: AblationSpec, name: str, requirement: Requirement | None, own: ArmConfig, base: ArmConfig
) -> Unlike | None:
    """Say why a part of the rule can give no answer on two arms.

    Memory of other work is no verdict, but whether a trial fits is an answer. A required speed is a budget, which a
    larger model may use.
    """
    metric = spec.metric_named(name)
    if metric.kind == "absolute" or (requirement is not None and requirement.max_value is not None):
        return None
    if requirement is None or metric.kind == "loss" or metric.decides == "curve":
        return unlike(metric, own, base, equal=spec.workload.steps.equal)
    return _other_tokens(metric, own, base)


def other_model(own: Arm, base: Arm) -> str | None:
    """List the differing gates and values that change the numerical model.

    None without one, and for commands, which have none.
    """
    workload = base.config
    pairs = {name: (value, base.gates[name]) for name, value in own.gates.items() if value != base.gates[name]}
    changed = {
        name: pair
        for name, pair in pairs.items()
        if workload.attested and workload.claim_of(name) is Claim.CHANGES_MODEL
    }
    values = {**changed, **own.config.changed_from(base.config)}
    return (
        ", ".join(f"{name} {show(value)} instead of {show(other)}" for name, (value, other) in values.items()) or None
    )
