"""From receipts to a verdict per variant, by the rule that was hashed before the first sample."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.analysis.arm_summary import summarise_arm
from experiments.analysis.evidence import Evidence, Exclusion, WholeBlocks, evidence_of
from experiments.analysis.exact import ExactFinding, judge_exactly
from experiments.analysis.requirements import judge_requirement
from experiments.analysis.statistics import Paired, holm, paired, percent
from experiments.analysis.verdicts import Comparison, RequirementResult, VariantVerdict, Verdict
from experiments.design.metrics import METRICS, PAIRED_METRICS
from experiments.design.plan import Plan
from experiments.design.power import ALPHA, MAX_BLOCKS, blocks_to_detect, detectable_per_sd
from experiments.design.rule import rule_digest, rule_of
from experiments.design.spec import AblationSpec, Primary
from experiments.documents import seal
from experiments.outcomes import Decision, VerdictWord
from experiments.records.circumstances import Circumstances
from experiments.records.receipts import Receipt

_CAPPED = frozenset({VerdictWord.BETTER, VerdictWord.SAME, VerdictWord.WORSE})
"""Words that need a calibrated node class, unless an exact metric decides."""


def judge(plan: Plan, spec: AblationSpec, receipts: Sequence[Receipt], circumstances: Circumstances) -> Verdict:
    """Return the verdict of every variant of `plan`.

    `receipts` are those of finished blocks; a block that lacks one does not count, and missing blocks never lead to
    adoption. `circumstances` are what is known besides: broken attempts, earlier askings, A/A blocks. Raises
    ReceiptError for a receipt that is not in the plan or is there twice.
    """
    whole = WholeBlocks(plan, receipts)
    evidence = [evidence_of(arm, whole) for arm in plan.arms[1:]]
    changed = _changed_rule(plan, spec)
    comparisons = _comparisons([found for found in evidence if found.exclusion is None and changed is None])
    judge_one = _Judge(plan, spec, whole, circumstances)
    fields: dict[str, Any] = {
        "ablation": plan.ablation,
        "spec_digest": plan.spec_digest,
        "rule_digest": plan.rule_digest,
        "rule": rule_of(spec),
        "circumstances": circumstances,
        "blocks_planned": len(plan.blocks),
        "blocks_counted": len(whole.blocks),
        "node_class": plan.node_class,
        "baseline": plan.baseline.name,
        "variants": tuple(judge_one(found, changed or found.exclusion, comparisons) for found in evidence),
        "arms": {arm.name: summarise_arm(whole.of(arm.name)) for arm in plan.arms},
    }
    return seal(Verdict(**fields, digest=""))


def _changed_rule(plan: Plan, spec: AblationSpec) -> Exclusion | None:
    if spec.digest == plan.spec_digest and rule_digest(spec) == plan.rule_digest:
        return None
    reason = "the spec or its rule is not the one that was planned; a changed rule is a new ablation"
    return Exclusion(word=VerdictWord.INVALID, reason=reason)


def _comparisons(evidence: Sequence[Evidence]) -> dict[tuple[str, str], Comparison]:
    """Compare every variant that has all its numbers on every ratio metric."""
    found: dict[tuple[str, str], Comparison] = {}
    for metric in PAIRED_METRICS:
        differences = {one.arm.name: _differences(one, metric) for one in evidence}
        compared = compare(metric, {arm: d for arm, d in differences.items() if d is not None})
        found.update({(arm, metric): comparison for arm, comparison in compared.items()})
    return found


def _differences(evidence: Evidence, metric: str) -> list[float] | None:
    """Return d of every block, or None where a block has none: missing data fails."""
    found = [pair.log_ratio(metric) for pair in evidence.pairs]
    known = [d for d in found if d is not None]
    return known if len(known) == len(found) >= 2 else None


def compare(metric: str, differences: Mapping[str, Sequence[float]]) -> dict[str, Comparison]:
    """Compare variants on one metric by their block differences d; Holm's correction runs over the variants."""
    results = {arm: paired(d) for arm, d in differences.items()}
    corrected = holm([found.p_t for found in results.values()])
    return {
        arm: _comparison(metric, found, differences[arm], p_holm)
        for (arm, found), p_holm in zip(results.items(), corrected, strict=True)
    }


def _comparison(metric: str, found: Paired, differences: Sequence[float], p_holm: float) -> Comparison:
    return Comparison(
        metric=metric,
        blocks=found.blocks,
        delta_pct=percent(found.mean),
        median_pct=percent(found.median),
        ci_low_pct=percent(found.ci95[0]),
        ci_high_pct=percent(found.ci95[1]),
        ci90_low_pct=percent(found.ci90[0]),
        ci90_high_pct=percent(found.ci90[1]),
        p_sign_flip=found.p_sign_flip,
        p_holm=p_holm,
        sd_pct=100 * found.sd,
        mde_pct=percent(detectable_per_sd(found.blocks) * found.sd),
        differences_pct=tuple(percent(difference) for difference in differences),
    )


def word_of(found: Comparison, primary: Primary) -> VerdictWord:
    """Return what the samples say: better or worse beyond the margin, the same within it, or inconclusive."""
    outside_zero = found.ci_low_pct > 0 or found.ci_high_pct < 0
    proved = outside_zero and found.p_holm <= ALPHA
    gain = gain_pct(found)
    if proved and abs(gain) > primary.margin:
        return VerdictWord.BETTER if gain > 0 else VerdictWord.WORSE
    if -primary.margin < found.ci90_low_pct and found.ci90_high_pct < primary.margin:
        return VerdictWord.SAME
    return VerdictWord.INCONCLUSIVE


def gain_pct(found: Comparison) -> float:
    """Return the change as improvement: positive is better, whatever the metric's direction."""
    return found.delta_pct if METRICS[found.metric].better == "higher" else -found.delta_pct


class _Judge:
    """Judges one variant after another by one rule."""

    def __init__(self, plan: Plan, spec: AblationSpec, whole: WholeBlocks, circumstances: Circumstances) -> None:
        self._plan = plan
        self._rule = spec.verdict
        self._refused_because = circumstances.admission.refused_because
        self._counted = len(whole.blocks)
        self._block_minutes = _block_minutes(plan, whole)

    def __call__(
        self, evidence: Evidence, exclusion: Exclusion | None, comparisons: Mapping[tuple[str, str], Comparison]
    ) -> VariantVerdict:
        name = evidence.arm.name
        own = {metric: comparisons[name, metric] for metric in PAIRED_METRICS if (name, metric) in comparisons}
        primary = own.pop(self._rule.primary.metric, None)
        exact = judge_exactly(evidence, self._rule.primary) if self._rule.primary.exact and not exclusion else None
        requirements = () if exclusion else tuple(judge_requirement(entry, evidence) for entry in self._rule.require)
        measured, reason = self._measured(exclusion, exact or primary)
        needed = self._blocks_needed(measured, primary)
        published, why = self._published(measured, reason)
        return VariantVerdict(
            arm=name,
            verdict=published,
            measured=measured,
            reason=why,
            decision=self._decide(published, exact or primary, requirements),
            primary=primary,
            exact=exact and exact.comparison,
            secondary=tuple(own.values()),
            requirements=requirements,
            gates_live=_gates_live(evidence.receipts),
            blocks_needed=needed,
            device_minutes_needed=None if needed is None else round(needed * self._block_minutes, 2),
            notes=tuple(self._notes(measured, exact or primary, requirements, needed)),
        )

    def _measured(
        self, exclusion: Exclusion | None, found: Comparison | ExactFinding | None
    ) -> tuple[VerdictWord, str]:
        if exclusion is not None:
            return exclusion.word, exclusion.reason
        planned = len(self._plan.blocks)
        if self._counted < planned or found is None:
            return VerdictWord.INCONCLUSIVE, f"{self._counted} of {planned} planned blocks counted; missing data fails"
        if isinstance(found, ExactFinding):
            return found.word, found.reason
        word = word_of(found, self._rule.primary)
        return word, f"{describe(found)}{_WHY[word].format(margin=self._rule.primary.margin)}"

    def _published(self, measured: VerdictWord, reason: str) -> tuple[VerdictWord, str]:
        if self._refused_because is None or measured not in _CAPPED or self._rule.primary.exact:
            return measured, reason
        return VerdictWord.INCONCLUSIVE, f"uncalibrated; the samples alone say '{measured}': {reason}"

    def _decide(
        self, word: VerdictWord, found: Comparison | ExactFinding | None, requirements: Sequence[RequirementResult]
    ) -> Decision:
        fixed = _DECISIONS.get(word)
        if fixed is not None:
            return fixed
        if not all(requirement.passed for requirement in requirements):
            return Decision.REJECT
        if word is VerdictWord.SAME:
            return Decision.SAME
        if isinstance(found, ExactFinding):
            return found.decision
        enough = found is not None and gain_pct(found) >= self._rule.primary.threshold_pct
        return Decision.ADOPT if enough else Decision.REJECT

    def _blocks_needed(self, measured: VerdictWord, found: Comparison | None) -> int | None:
        if measured is not VerdictWord.INCONCLUSIVE or found is None or found.sd_pct == 0:
            return None
        effect, margin = abs(found.delta_pct), self._rule.primary.margin
        resolution = effect if effect > margin else margin - effect
        return blocks_to_detect(resolution, found.sd_pct, minimum=max(self._counted + 1, len(self._plan.blocks)))

    def _notes(
        self,
        measured: VerdictWord,
        found: Comparison | ExactFinding | None,
        requirements: Sequence[RequirementResult],
        needed: int | None,
    ) -> Iterable[str]:
        for failed in (requirement for requirement in requirements if not requirement.passed):
            yield f"requirement not met: {failed.metric} {failed.rule}: {failed.detail}"
        if isinstance(found, ExactFinding):
            yield from found.notes
            return
        if found is None:
            return
        threshold = self._rule.primary.threshold_pct
        if measured is VerdictWord.BETTER and gain_pct(found) < threshold:
            yield f"better by {gain_pct(found):.2f} %, below the {threshold:g} % from which the rule adopts"
        if measured is VerdictWord.INCONCLUSIVE and needed is None and found.sd_pct > 0:
            why = "the estimate lies at the margin or is too noisy"
            yield f"no number of blocks up to {MAX_BLOCKS} would resolve this: {why}"


_WHY = {
    VerdictWord.BETTER: ": beyond the margin of {margin:g} % for the better",
    VerdictWord.WORSE: ": beyond the margin of {margin:g} % for the worse",
    VerdictWord.SAME: ": the 90 % interval lies inside the margin of {margin:g} %",
    VerdictWord.INCONCLUSIVE: ": neither a difference nor sameness within the margin of {margin:g} % is proved",
}

_DECISIONS = {
    VerdictWord.INCONCLUSIVE: Decision.INCONCLUSIVE,
    VerdictWord.INVALID: Decision.INVALID,
    VerdictWord.REFUSED: Decision.INVALID,
    VerdictWord.WORSE: Decision.REJECT,
    VerdictWord.OOM: Decision.REJECT,
    VerdictWord.FAILED: Decision.REJECT,
}
"""Decisions that follow from the word alone."""


def describe(found: Comparison) -> str:
    """Write a comparison in one phrase, for example "tokens_per_s +2.41 % [+1.90, +2.92] over 6 blocks"."""
    interval = f"[{found.ci_low_pct:+.2f}, {found.ci_high_pct:+.2f}]"
    return f"{found.metric} {found.delta_pct:+.2f} % {interval} over {found.blocks} blocks"


def _gates_live(receipts: Sequence[Receipt]) -> str:
    live = [reading.live for receipt in receipts for reading in receipt.gates.values()]
    return f"{sum(live)}/{len(live)}"


def _block_minutes(plan: Plan, whole: WholeBlocks) -> float:
    """Return device minutes of a mean block: the mean wall time of every arm's trials, summed."""
    walls = ([receipt.wall_s for receipt in whole.of(arm.name)] for arm in plan.arms)
    return plan.devices * math.fsum(math.fsum(wall) / len(wall) for wall in walls if wall) / 60
