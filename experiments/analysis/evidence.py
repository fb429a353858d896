"""Evidence: the receipts of an ablation as pairs of a variant and the baseline, and reasons to exclude a variant."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ablate.experiments.analysis.guards import (
    between_blocks_problem,
    block_problems,
    clock_problem,
    order_problems,
    pause_s,
    program_problem,
    receipt_problems,
    started,
    unchanged_kernels,
)
from ablate.experiments.analysis.statistics import log_of_ratio
from ablate.experiments.block_numbers import block_name
from ablate.experiments.design.arms import Arm
from ablate.experiments.design.gate import Claim
from ablate.experiments.design.plan import BlockPlan, Plan
from ablate.experiments.design.spec import MIN_BLOCKS
from ablate.experiments.errors import ReceiptError
from ablate.experiments.outcomes import Outcome, VerdictWord
from ablate.experiments.records.receipts import Receipt, read_named

_ENDED = {
    Outcome.REFUSED: "were refused",
    Outcome.OOM: "ran out of memory",
    Outcome.TIMEOUT: "took too long",
    Outcome.FAILED: "failed",
    Outcome.INVALID: "were invalid",
}
"""How trials with an outcome ended; the first outcome among a variant's trials is its verdict."""


LONGEST_PAUSE_S = 120.0
"""A trial that began later than this after the end of another one does not follow it."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The two compared trials of one block."""

    block_index: int
    seed: int
    baseline: Receipt
    variant: Receipt

    def log_ratio(self, metric: str) -> float | None:
        """Return d = ln(variant / baseline) of a ratio metric; None if a trial was not measured or has no value."""
        if not all(receipt.outcome is Outcome.MEASURED for receipt in (self.variant, self.baseline)):
            return None
        own, other = (read_named(metric, receipt) for receipt in (self.variant, self.baseline))
        return log_of_ratio(own, other)


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Why a variant has no statistics."""

    word: VerdictWord
    reason: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The receipts of one variant, paired with the baseline's."""

    arm: Arm
    claim: Claim
    """The weakest claim among the gates in which the variant differs from the baseline."""
    receipts: tuple[Receipt, ...]
    """The variant's receipts in block order."""
    pairs: tuple[Pair, ...]
    lost: tuple[Pair, ...]
    """Blocks that do not count because the baseline alone did not measure, if they are few."""
    exclusion: Exclusion | None
    no_baseline: str | None
    """How the baseline ended, if there is nothing to compare with."""


class WholeBlocks:
    """The receipts of one ablation by block and arm.

    A block counts for a variant if the variant's receipt and the baseline's exist. A variant without a receipt does not
    take blocks from the others. Raises ReceiptError for a receipt that is not in the plan or is a duplicate.
    """

    def __init__(self, plan: Plan, receipts: Sequence[Receipt]) -> None:
        self.plan = plan
        self._by_place = _by_place(plan, receipts)
        counted = {arm.name: self._blocks_with(arm.name) for arm in plan.arms[1:]}
        own = [counted[arm.name] for arm in plan.variants]
        self.blocks = tuple(block for block in plan.blocks if any(block in blocks for blocks in own))
        """The blocks that count for at least one variant, in the plan's order."""
        self._blocks_of = {plan.baseline.name: self.blocks, **counted}

    def blocks_of(self, arm: str) -> tuple[BlockPlan, ...]:
        """Return the blocks that count for `arm`, in the plan's order; for the baseline those of all variants."""
        return self._blocks_of[arm]

    def of(self, arm: str) -> tuple[Receipt, ...]:
        """Return the receipts of `arm` over the blocks that count for it, in their order."""
        return tuple(self._by_place[block.index, arm] for block in self.blocks_of(arm))

    def pairs(self, variant: str) -> tuple[Pair, ...]:
        """Return the trials of `variant` and of the baseline, block by block."""
        return tuple(
            Pair(
                block_index=block.index,
                seed=block.seed,
                baseline=self._by_place[block.index, self.plan.baseline.name],
                variant=self._by_place[block.index, variant],
            )
            for block in self.blocks_of(variant)
        )

    def in_block(self, index: int) -> tuple[Receipt, ...]:
        """Return every receipt of block `index`, even if the block does not count."""
        return tuple(receipt for (block, _), receipt in self._by_place.items() if block == index)

    @cached_property
    def before(self) -> Mapping[str, str]:
        """By digest of a receipt, the arm of the trial that ended right before it on the same first device."""
        by_device: dict[tuple[str, str], list[Receipt]] = {}
        for receipt in sorted(self._by_place.values(), key=started):
            first, *_more = str(receipt.ids.device).split(",")
            by_device.setdefault((receipt.ids.node, first), []).append(receipt)
        return {
            later.digest: earlier.arm
            for receipts in by_device.values()
            for earlier, later in pairwise(receipts)
            if pause_s(earlier, later) <= LONGEST_PAUSE_S and later.waited_s is None
        }

    def _blocks_with(self, variant: str) -> tuple[BlockPlan, ...]:
        both = (variant, self.plan.baseline.name)
        return tuple(block for block in self.plan.blocks if all((block.index, name) in self._by_place for name in both))


def evidence_of(arm: Arm, whole: WholeBlocks) -> Evidence:
    """Return the evidence on the variant `arm`."""
    every = whole.pairs(arm.name)
    lost = _lost_baselines(every)
    pairs = tuple(pair for pair in every if pair not in lost)
    claim = weakest_claim(arm, whole.plan.baseline)
    exclusion = _excluded_by_outcome(pairs) or _excluded_by_guards(pairs, whole) or _excluded_by_claim(pairs, claim)
    return Evidence(
        arm=arm,
        claim=claim,
        receipts=whole.of(arm.name),
        pairs=pairs,
        lost=lost,
        exclusion=exclusion,
        no_baseline=_without_baseline(pairs),
    )


_KEPT_FOR_ONE = 6
"""Blocks of which one may be lost with its baseline."""


def _lost_baselines(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return the blocks in which the baseline alone did not measure; none if they are many or too few others remain."""
    lost = tuple(
        pair
        for pair in pairs
        if pair.baseline.outcome is not Outcome.MEASURED and pair.variant.outcome is Outcome.MEASURED
    )
    few = _KEPT_FOR_ONE * len(lost) <= len(pairs) and len(pairs) - len(lost) >= MIN_BLOCKS
    return lost if few else ()


def _without_baseline(pairs: Sequence[Pair]) -> str | None:
    """Return how the baseline ended, if it leaves nothing to compare with.

    A measured variant needs every trial of the baseline. A variant that was not measured is a result beside a measured
    baseline. If the baseline was never measured either, the variant is no worse.
    """
    bad = [pair.baseline.outcome for pair in pairs if pair.baseline.outcome is not Outcome.MEASURED]
    measured = all(pair.variant.outcome is Outcome.MEASURED for pair in pairs)
    if not bad or (len(bad) < len(pairs) and not measured):
        return None
    return f"{_ENDED[bad[0]].replace('were', 'was')} in {len(bad)} of {len(pairs)} trials"


def _excluded_by_guards(pairs: Sequence[Pair], whole: WholeBlocks) -> Exclusion | None:
    for pair in pairs:
        problem = next(_guards(pair, whole), None)
        if problem is not None:
            return Exclusion(word=VerdictWord.INVALID, reason=f"{block_name(pair.block_index)}: {problem}")
    own, others = [pair.variant for pair in pairs], [pair.baseline for pair in pairs]
    problem = between_blocks_problem([*others, *own]) or program_problem(others) or program_problem(own)
    if problem is None and whole.plan.timed:
        problem = clock_problem(own, others)
    return None if problem is None else Exclusion(word=VerdictWord.INVALID, reason=problem)


def _guards(pair: Pair, whole: WholeBlocks) -> Iterator[str]:
    for receipt in (pair.baseline, pair.variant):
        yield from (f"arm '{receipt.arm}': {problem}" for problem in receipt_problems(receipt, whole.plan))
    yield from block_problems([pair.baseline, pair.variant])
    if whole.plan.timed:
        yield from order_problems(whole.in_block(pair.block_index))
    if unchanged := unchanged_kernels(pair.variant, pair.baseline):
        yield unchanged


def _by_place(plan: Plan, receipts: Sequence[Receipt]) -> dict[tuple[int, str], Receipt]:
    names = {arm.name for arm in plan.arms}
    places: dict[tuple[int, str], Receipt] = {}
    for receipt in receipts:
        place = receipt.ids.block_index, receipt.arm
        if receipt.arm not in names or not 0 <= receipt.ids.block_index < len(plan.blocks):
            raise ReceiptError(f"receipt of arm '{receipt.arm}' in {block_name(place[0])} is not in the plan")
        if place in places:
            raise ReceiptError(f"two receipts of arm '{receipt.arm}' in {block_name(place[0])}; each trial counts once")
        places[place] = receipt
    return places


def weakest_claim(arm: Arm, baseline: Arm) -> Claim:
    """Return the weakest claim among the settings in which `arm` differs from `baseline`."""
    if arm.config.changed_from(baseline.config):
        return Claim.CHANGES_MODEL
    return baseline.config.claim(arm.gates, baseline.gates)


def _excluded_by_outcome(pairs: Sequence[Pair]) -> Exclusion | None:
    for outcome, ended in _ENDED.items():
        hit = [pair.variant for pair in pairs if pair.variant.outcome is outcome]
        if hit:
            what = hit[0].message or f"outcome {outcome}"
            reason = f"{len(hit)} of {len(pairs)} trials {ended}: {what}"
            return Exclusion(word=VerdictWord(outcome.value), reason=reason)
    bad = [pair.baseline for pair in pairs if pair.baseline.outcome is not Outcome.MEASURED]
    if bad:
        what = bad[0].message or f"outcome {bad[0].outcome}"
        reason = f"{len(bad)} of {len(pairs)} baseline trials {_ENDED[bad[0].outcome]}: {what}"
        return Exclusion(word=VerdictWord.INVALID, reason=reason)
    return None


def _excluded_by_claim(pairs: Sequence[Pair], claim: Claim) -> Exclusion | None:
    if claim is not Claim.SCHEDULE_ONLY:
        return None
    for pair in pairs:
        if pair.variant.summary is None or pair.baseline.summary is None:
            continue
        ours, theirs = pair.variant.summary.loss_step1, pair.baseline.summary.loss_step1
        if ours != theirs:
            reason = f"{block_name(pair.block_index)}: step-1 loss {ours!r} is not the baseline's {theirs!r}, "
            return Exclusion(
                word=VerdictWord.INVALID, reason=reason + "but the gates claim to change the schedule only"
            )
    return None
