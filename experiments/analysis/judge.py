"""From receipts to a verdict per variant, by the rule that was hashed before the first sample."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from experiments.analysis.answer import (
    Answer,
    beyond_margin,
    capped,
    decide,
    gain_pct,
    granted,
    open_because,
    rejected_first,
    sentence,
    told,
    word_of,
)
from experiments.analysis.arm_summary import summarise_arm
from experiments.analysis.comparing import Levels, compare, sample_of
from experiments.analysis.evidence import Evidence, Exclusion, Pair, WholeBlocks, evidence_of
from experiments.analysis.exact import ExactFinding, judge_exactly, not_exact
from experiments.analysis.prediction import ENOUGH, chances_of
from experiments.analysis.requirements import judge_requirement
from experiments.analysis.sample_checks import spreads_differ, stalls_differ
from experiments.analysis.statistics import dependence_of
from experiments.analysis.verdicts import Cause, Comparison, RequirementResult, VariantVerdict, Verdict
from experiments.block_numbers import block_list, block_name
from experiments.design.metrics import METRICS, PAIRED_METRICS, WINDOW_METRICS
from experiments.design.plan import Plan
from experiments.design.power import MAX_BLOCKS, alpha_of, level_shares
from experiments.design.rule import other_model, other_work, rule_digest, rule_of
from experiments.design.spec import AblationSpec, Blocks
from experiments.documents import seal
from experiments.outcomes import Decision, FailureClass, Outcome, VerdictWord
from experiments.records.circumstances import AttemptRecord, Circumstances
from experiments.records.receipts import Receipt
from kernels.backends import NODE_CLASSES


def share_at(blocks: Blocks, counted: int) -> float:
    """Return the share of the level that the look reached with `counted` blocks spends; before the first, its share."""
    looks = blocks.schedule
    reached = [share for look, share in zip(looks, level_shares(looks), strict=True) if look <= counted]
    return reached[-1] if reached else level_shares(looks)[0]


def missing(spec: AblationSpec, pairs: Sequence[Pair], known: Circumstances) -> str | None:
    """Return which blocks are missing and why: those that count must be the first ones, up to one of the looks."""
    looks, counted = spec.design.blocks.schedule, sorted(pair.block_index for pair in pairs)
    if counted == list(range(len(counted))) and len(counted) in looks:
        return None
    due = next((look for look in looks if not counted or look > counted[-1]), looks[-1])
    why = "; ".join(_why(set(range(due)) - set(counted), known))
    return f"{len(counted)} of {due} planned blocks counted{f': {why}' if why else '; missing data fails'}"


def _why(absent: Set[int], known: Circumstances) -> Iterator[str]:
    """Say what ended an ablation before all blocks had run, and how absent blocks broke."""
    if known.not_run is not None:
        yield known.not_run
    broken = [attempt for attempt in known.attempts if attempt.block_index in absent]
    if broken:
        places, last = sorted({attempt.block_index for attempt in broken}), broken[-1]
        blocks = "blocks" if len(places) > 1 else "block"
        yield f"{blocks} {block_list(places)} broke ({last.failure_class}: {last.message})"


_BY_THE_ARM = frozenset(
    {FailureClass.TIMEOUT, FailureClass.NO_RECEIPT, FailureClass.OOM, FailureClass.NUMERICS, FailureClass.USER_ERROR}
)
"""What an arm's own run ends by: its slow trials may be those that ended, and the rerun the lucky ones."""
_FROM_OUTSIDE = frozenset({FailureClass.INVALID_MEASUREMENT, FailureClass.INFRA_NODE})
"""What comes from outside as a rule: a guard's hit, a device that failed, a process that somebody killed."""
HITS_BY_CHANCE = 1
"""More of these in one arm than in the other that are put down to chance."""


def caused_by(attempts: Sequence[AttemptRecord], variant: str, baseline: str) -> str | None:
    """Return the reruns that one of two compared arms may have caused, or None.

    One trial that ended by itself is enough. What comes from outside counts when one arm has at least two more of it
    than the other.
    """
    own = [attempt for attempt in attempts if attempt.arm in (variant, baseline)]
    ended = [attempt for attempt in own if attempt.failure_class in _BY_THE_ARM]
    if ended:
        return _told(ended)
    hits = [attempt for attempt in own if attempt.failure_class in _FROM_OUTSIDE]
    uneven = abs(sum(1 if hit.arm == variant else -1 for hit in hits))
    return _told(hits) if uneven > HITS_BY_CHANCE else None


def _told(attempts: Sequence[AttemptRecord]) -> str:
    first = attempts[0]
    what = f"attempt {first.number} at {block_name(first.block_index)} ended with arm '{first.arm}'"
    more = f", and {len(attempts) - 1} more like it" if len(attempts) > 1 else ""
    return f"{what} ({first.failure_class}: {first.message}){more}"


_NAMED_EARLIER = 3
"""Earlier askings that a note names."""
_WORTH_A_NOTE = 1.005
"""Widening from which a note says it."""


def judge(plan: Plan, spec: AblationSpec, receipts: Sequence[Receipt], circumstances: Circumstances) -> Verdict:
    """Return the verdict of every variant of `plan`.

    `receipts` are those of finished blocks; a block that lacks a variant's does not count for it, and missing blocks
    never lead to adoption; blocks beyond a look are not missing. `circumstances` are what is known besides: broken
    attempts, earlier askings, A/A blocks. Raises ReceiptError for a receipt that is not in the plan or is there twice.
    """
    whole = WholeBlocks(plan, receipts)
    changed = _changed_rule(plan, spec)
    judge_one = _Judge(plan, spec, whole, circumstances)
    evidence = [evidence_of(arm, whole) for arm in plan.variants]
    comparisons = judge_one.comparisons([found for found in evidence if found.exclusion is None and changed is None])
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


class _Judge:
    """Judges one variant after another by one rule."""

    def __init__(self, plan: Plan, spec: AblationSpec, whole: WholeBlocks, circumstances: Circumstances) -> None:
        self._plan = plan
        self._spec = spec
        self._rule = spec.verdict
        self._family = len(plan.variants)
        primary = self._rule.primary.metric
        self._compared = tuple(m for m in PAIRED_METRICS if m == primary or m in WINDOW_METRICS)
        self._circumstances = circumstances
        self._block_minutes = _block_minutes(plan, whole)

    def comparisons(self, evidence: Sequence[Evidence]) -> dict[tuple[str, str], Comparison]:
        """Compare every variant that has all its numbers on every metric of the window, and on the one that decides."""
        alphas = {one.arm.name: self._alpha(one) for one in evidence}
        levels = Levels(
            family=self._family,
            alphas=alphas,
            margin_pct=self._rule.primary.margin,
            dependence=dependence_of(self._circumstances.admission.calibrations),
        )
        found: dict[tuple[str, str], Comparison] = {}
        for metric in self._compared:
            samples = {one.arm.name: sample_of(one, metric) for one in evidence}
            known = {arm: sample for arm, sample in samples.items() if sample is not None}
            found |= {(arm, metric): compared for arm, compared in compare(metric, known, levels).items()}
        return found

    def _alpha(self, evidence: Evidence) -> float:
        number = self._circumstances.family.number_of(evidence.arm.name)
        return alpha_of(number) * share_at(self._spec.design.blocks, len(evidence.pairs))

    def __call__(
        self, evidence: Evidence, exclusion: Exclusion | None, comparisons: Mapping[tuple[str, str], Comparison]
    ) -> VariantVerdict:
        name, rule = evidence.arm.name, self._rule.primary
        own = {metric: comparisons[name, metric] for metric in self._compared if (name, metric) in comparisons}
        primary = own.pop(rule.metric, None)
        exact = judge_exactly(evidence, rule) if rule.exact and exclusion is None else None
        requirements = () if exclusion else self._requirements(evidence)
        found = rejected_first(self._answer(evidence, exclusion, exact or primary), requirements)
        chances = self._chances(name, found, primary)
        needed = next((blocks for blocks, chance in chances.items() if chance >= ENOUGH), None)
        notes = [f"requirement not met: {e.metric} {e.rule}: {e.detail}" for e in requirements if not e.passed]
        return VariantVerdict(
            arm=name,
            verdict=found.published,
            measured=found.measured,
            cause=found.cause,
            beyond_margin=primary is not None and beyond_margin(primary, rule),
            reason=found.reason,
            missing=found.missing,
            other_work=self._other_work(evidence),
            other_model=other_model(evidence.arm.gates, self._plan.baseline.gates),
            no_baseline=evidence.no_baseline,
            decision=self._decision(evidence, found, exact.decision if exact else granted(primary, rule), requirements),
            primary=primary,
            exact=exact and exact.comparison,
            secondary=tuple(own.values()),
            requirements=requirements,
            gates_live=_gates_live(evidence.receipts),
            chances=chances,
            blocks_needed=needed,
            device_minutes_needed=None if needed is None else round(needed * self._block_minutes, 2),
            notes=(
                *notes,
                *(exact.notes if exact else self._notes(found, primary, chances)),
                *self._family_notes(name),
            ),
        )

    def _requirements(self, evidence: Evidence) -> tuple[RequirementResult, ...]:
        node_class = NODE_CLASSES[self._plan.node_class]
        return tuple(judge_requirement(entry, evidence, node_class) for entry in self._rule.require)

    def _decision(
        self, evidence: Evidence, found: Answer, when_met: Decision, requirements: Sequence[RequirementResult]
    ) -> Decision:
        if evidence.no_baseline is not None:
            return Decision.INVALID
        return decide(found.published, when_met, requirements)

    def _answer(
        self, evidence: Evidence, exclusion: Exclusion | None, primary: Comparison | ExactFinding | None
    ) -> Answer:
        if exclusion is not None:
            return told(exclusion.word, exclusion.reason)
        absent = missing(self._spec, evidence.pairs, self._circumstances)
        if absent or primary is None:
            return open_because(Cause.MISSING, _absent_words(absent, primary))
        other = self._other_work(evidence)
        if isinstance(primary, ExactFinding):
            return capped(told(primary.word, primary.reason), Cause.OTHER_WORK, other)
        return self._of_samples(evidence, primary, other)

    def _other_work(self, evidence: Evidence) -> str | None:
        return other_work(METRICS[self._rule.primary.metric], evidence.arm.config, self._plan.baseline.config)

    def _of_samples(self, evidence: Evidence, primary: Comparison, other: str | None) -> Answer:
        sample = sample_of(evidence, self._rule.primary.metric)
        if sample is None:
            raise AssertionError("there is a comparison, hence a sample")
        stalls = stalls_differ(sample, self._rule.primary.margin)
        if stalls is not None:
            return open_because(Cause.STALLS, stalls)
        word = word_of(primary, self._rule.primary)
        found = told(word, sentence(word, primary, self._rule.primary))
        found = capped(found, Cause.OTHER_WORK, other)
        found = capped(found, Cause.SPREADS, spreads_differ(sample))
        reruns = caused_by(self._circumstances.attempts, evidence.arm.name, self._plan.baseline.name)
        found = capped(found, Cause.RERUNS, reruns)
        return capped(found, Cause.UNCALIBRATED, self._circumstances.admission.refused_because)

    def _chances(self, arm: str, found: Answer, primary: Comparison | None) -> dict[int, float]:
        if found.cause is not Cause.NOT_PROVED or primary is None:
            return {}
        level = alpha_of(self._circumstances.family.number_of(arm) + 1) / self._family
        return chances_of(primary, level=level, margin_pct=self._rule.primary.margin)

    def _notes(self, found: Answer, primary: Comparison | None, chances: Mapping[int, float]) -> Iterator[str]:
        threshold = self._rule.primary.threshold_pct
        if primary is not None and found.measured is VerdictWord.BETTER and gain_pct(primary) < threshold:
            yield f"better by {gain_pct(primary):.2f} %, below the {threshold:g} % from which the rule adopts"
        if chances and max(chances.values()) < ENOUGH:
            yield f"no number of blocks up to {MAX_BLOCKS} would answer this with a chance of {ENOUGH:.0%}"
        if primary is not None and primary.widened >= _WORTH_A_NOTE:
            wider = f"{primary.widened:.2f} times wider"
            yield f"neighbouring A/A blocks resemble each other: tests and intervals are {wider}"

    def _family_notes(self, arm: str) -> Iterator[str]:
        """Say which asking it is: every earlier one that ran anything counts, whether or not it gave a sample."""
        number = self._circumstances.family.number_of(arm)
        earlier = [one for one in self._circumstances.family.earlier if arm in one.asked]
        if number > 1:
            named = ", ".join(f"'{one.name}' ({one.state})" for one in earlier[-_NAMED_EARLIER:])
            level = "" if self._rule.primary.exact else f", tested at {100 * alpha_of(number):.2g} %"
            yield f"asking {number} of this question{level}; before it: {named}"


def _absent_words(absent: str | None, primary: Comparison | ExactFinding | None) -> str:
    """Say what is missing, and which repeats differ of those that are there."""
    shown = primary.comparison if isinstance(primary, ExactFinding) else None
    differ = [not_exact(shown)] if shown is not None and shown.problems else []
    return "; ".join([absent or "a trial has no value; missing data fails", *differ])


def _gates_live(receipts: Sequence[Receipt]) -> str:
    """Say how many gates were live in the trials that ended by themselves; one that was stopped had not shown all."""
    whole = [receipt for receipt in receipts if receipt.outcome not in _CUT_SHORT]
    live = [(name, reading.live) for receipt in whole for name, reading in receipt.gates.items()]
    idle = ", ".join(sorted({name for name, is_live in live if not is_live}))
    cut = len(receipts) - len(whole)
    unseen = [f"{cut} {'trial' if cut == 1 else 'trials'} ended before all were seen"] if cut else []
    counts = [f"{sum(is_live for _, is_live in live)}/{len(live)}"] if live else []
    return ", ".join([*counts, *([f"not live: {idle}"] if idle else []), *unseen]) or "none was seen"


_CUT_SHORT = (Outcome.TIMEOUT, Outcome.OOM, Outcome.FAILED)
"""Outcomes of trials that did not come to their end."""


def _block_minutes(plan: Plan, whole: WholeBlocks) -> float:
    """Return device minutes of a mean block: the mean wall time of every arm's trials, summed."""
    walls = ([receipt.wall_s for receipt in whole.of(arm.name)] for arm in plan.arms)
    return plan.busy_devices * math.fsum(math.fsum(wall) / len(wall) for wall in walls if wall) / 60
