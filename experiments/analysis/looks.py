"""Looks: whether an ablation continues after one of its looks.

It stops when every variant has an answer, when more blocks cannot bring one, and for futility. Stopping for futility
only removes chances of a verdict, so it costs no error rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ablate.experiments.analysis.judge import judge
from ablate.experiments.analysis.prediction import Conditions, chance_with_more, estimate_of
from ablate.experiments.analysis.verdicts import Cause, VariantVerdict, unit_of_shares
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.power import Look
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.outcomes import GOOD, VerdictWord
from ablate.experiments.records.circumstances import Circumstances
from ablate.experiments.records.receipts import Receipt

FUTILE = 0.1
"""No more blocks run if the chance of an answer at a later look is below this."""
_HOPELESS = frozenset({Cause.MISSING, Cause.RERUNS, Cause.NO_RATIO, Cause.REPEATED_SEEDS})
"""Causes that more blocks do not remove."""


@dataclass(frozen=True, kw_only=True)
class LookDecision:
    """Whether the blocks beyond a look run."""

    go_on: bool
    reason: str


def at_look(
    plan: Plan, spec: AblationSpec, receipts: Sequence[Receipt], circumstances: Circumstances, look: int
) -> LookDecision:
    """Decide after the blocks of `design.blocks.schedule[look]`, `look` from 0, whether the blocks beyond it run.

    `receipts` of later blocks are ignored. The samples' verdicts count, because more blocks do not lift the cap of a
    missing calibration. Raises IndexError for a look that is not in the schedule.
    """
    looks = spec.design.blocks.schedule
    blocks = looks[look]
    if blocks == looks[-1]:
        return LookDecision(go_on=False, reason=f"{blocks} blocks are the last look")
    early = [receipt for receipt in receipts if receipt.ids.block_index < blocks]
    verdict = judge(plan, spec, early, circumstances)
    undecided = [variant for variant in verdict.variants if _undecided(variant, spec)]
    if not undecided:
        words = ", ".join(f"'{variant.arm}' {variant.measured}" for variant in verdict.variants)
        return LookDecision(go_on=False, reason=f"after {blocks} blocks: {words}")
    chances = {
        variant.arm: _chance(variant, spec, blocks, _level(plan, spec, circumstances, variant)) for variant in undecided
    }
    best, chance = max(chances.items(), key=lambda entry: entry[1])
    reason = f"after {blocks} blocks the best chance of an answer by {looks[-1]} blocks is {chance:.0%} ('{best}')"
    if chance < FUTILE:
        return LookDecision(go_on=False, reason=f"{reason}: more blocks are futile")
    return LookDecision(go_on=True, reason=reason)


def _level(plan: Plan, spec: AblationSpec, circumstances: Circumstances, variant: VariantVerdict) -> float:
    return spec.verdict.level_of(circumstances.family.number_of(variant.arm)) / len(plan.variants)


def _undecided(variant: VariantVerdict, spec: AblationSpec) -> bool:
    """Return whether more blocks may bring an answer. For an exact metric and for other work they cannot."""
    results = zip(spec.verdict.require, variant.requirements, strict=False)  # an excluded variant has no results
    margins = any(rule.not_worse_by is not None and result.undecided for rule, result in results)
    unanswered = variant.measured is VerdictWord.INCONCLUSIVE or variant.cause in (Cause.SPREADS, Cause.RARE_EVENTS)
    unanswered |= margins and variant.measured in GOOD  # their decision waits for requirements
    fixed = variant.exact is not None or variant.other_work is not None
    return unanswered and variant.cause not in _HOPELESS and not fixed


def _chance(variant: VariantVerdict, spec: AblationSpec, blocks: int, level: float) -> float:
    """Return the chance of an answer at the best of the later looks; 1 without an estimate."""
    compared = variant.primary
    estimate = None if compared is None else estimate_of(compared)
    if estimate is None or compared is None:
        return 1.0
    schedule = spec.design.blocks.schedule
    margin = spec.verdict.primary.in_percent(unit_of_shares(compared.baseline)).margin_pct
    return max(
        chance_with_more(
            estimate, Conditions(level=Look(schedule, number).level(level), margin_pct=margin), more=size - blocks
        )
        for number, size in enumerate(schedule)
        if size > blocks
    )
