"""Looks: whether an ablation goes on after one of its looks.

It stops where every variant has an answer, where no more blocks can bring one, and for futility. Futility takes chances
away from words and adds none, so it costs no error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.analysis.judge import judge
from experiments.analysis.prediction import Asked, chance_with_more, known_of
from experiments.analysis.verdicts import Cause, VariantVerdict
from experiments.design.plan import Plan
from experiments.design.power import alpha_of, level_shares
from experiments.design.spec import AblationSpec
from experiments.outcomes import VerdictWord
from experiments.records.circumstances import Circumstances
from experiments.records.receipts import Receipt

FUTILE = 0.1
"""Chance of an answer at a later look below which no more blocks run."""
_HOPELESS = frozenset({Cause.MISSING, Cause.RERUNS})
"""Causes that more blocks do not mend."""


@dataclass(frozen=True, kw_only=True)
class LookDecision:
    """Whether the blocks beyond a look run."""

    go_on: bool
    reason: str


def at_look(
    plan: Plan, spec: AblationSpec, receipts: Sequence[Receipt], circumstances: Circumstances, look: int
) -> LookDecision:
    """Decide after the blocks of `design.blocks.schedule[look]`, `look` from 0, whether the blocks beyond it run.

    `receipts` of later blocks are ignored. Words count as the samples say them: a cap for want of calibration is not
    mended by more blocks. Raises IndexError for a look that is not in the schedule.
    """
    looks = spec.design.blocks.schedule
    blocks = looks[look]
    if blocks == looks[-1]:
        return LookDecision(go_on=False, reason=f"{blocks} blocks are the last look")
    early = [receipt for receipt in receipts if receipt.ids.block_index < blocks]
    verdict = judge(plan, spec, early, circumstances)
    undecided = [found for found in verdict.variants if _undecided(found)]
    if not undecided:
        return LookDecision(go_on=False, reason=f"after {blocks} blocks: {_words(verdict.variants)}")
    chances = {found.arm: _chance(found, spec, blocks, _level(plan, circumstances, found)) for found in undecided}
    best, chance = max(chances.items(), key=lambda entry: entry[1])
    told = f"after {blocks} blocks '{best}' has a chance of {chance:.0%} of an answer by {looks[-1]} blocks"
    if chance < FUTILE:
        return LookDecision(go_on=False, reason=f"{told}, and no variant a higher one: more blocks are futile")
    return LookDecision(go_on=True, reason=told)


def _level(plan: Plan, circumstances: Circumstances, found: VariantVerdict) -> float:
    return alpha_of(circumstances.family.number_of(found.arm)) / len(plan.variants)


def _undecided(found: VariantVerdict) -> bool:
    """Return whether more blocks may bring an answer; that a metric is not exact is one, and so is other work."""
    unanswered = found.measured is VerdictWord.INCONCLUSIVE or found.cause is Cause.SPREADS
    fixed = found.exact is not None or found.other_work is not None
    return unanswered and found.cause not in _HOPELESS and not fixed


def _words(variants: Sequence[VariantVerdict]) -> str:
    return ", ".join(f"'{found.arm}' {found.measured}" for found in variants)


def _chance(found: VariantVerdict, spec: AblationSpec, blocks: int, level: float) -> float:
    """Return the chance of an answer at the best of the later looks; 1 where nothing is known about it."""
    known = None if found.primary is None else known_of(found.primary)
    if known is None:
        return 1.0
    later = zip(spec.design.blocks.schedule, level_shares(spec.design.blocks.schedule), strict=True)
    margin = spec.verdict.primary.margin
    return max(
        chance_with_more(known, Asked(level=level * share, margin_pct=margin), more=size - blocks)
        for size, share in later
        if size > blocks
    )
