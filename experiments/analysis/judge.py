"""From receipts to a verdict per variant, by the rule that was hashed before the first sample."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ablate.experiments.analysis.answer import (
    FEW_SAMPLES,
    Answer,
    adopt_or_reject,
    as_measured,
    bad_runs,
    capped,
    decide,
    gain_pct,
    open_cause,
    sentence,
    undecided,
    with_broken_requirements,
    word_of,
)
from ablate.experiments.analysis.arm_summary import gates_live, largest_micro_batch, seed_report, summarise_arm
from ablate.experiments.analysis.comparing import (
    Levels,
    Sample,
    baseline_mean,
    compare,
    sample_of,
    shrunk_pct,
)
from ablate.experiments.analysis.curves import off_the_curves
from ablate.experiments.analysis.declared import declared_directions, no_ratio, repeated_seeds, step_above
from ablate.experiments.analysis.evidence import Evidence, Exclusion, WholeBlocks, evidence_of
from ablate.experiments.analysis.exact import ExactResult, judge_exactly, not_exact
from ablate.experiments.analysis.guards import clock_note
from ablate.experiments.analysis.influences import (
    WordTests,
    explained_by_carry_over,
    holds,
    influences,
    said_by_median,
    scope_of,
)
from ablate.experiments.analysis.noise.calibrate import aa_blocks_of
from ablate.experiments.analysis.prediction import ENOUGH, chances_of, most_blocks
from ablate.experiments.analysis.programs import (
    clocks_apart,
    contradictions_of,
    costs_of,
    kernel_note,
    other_tokens,
    program_notes,
    step_kernels,
)
from ablate.experiments.analysis.requirements import judge_requirement, result_of
from ablate.experiments.analysis.sample_checks import (
    estimates_apart,
    noise_differs,
    noisier,
    spreads_differ,
    stalls_differ,
)
from ablate.experiments.analysis.statistics import count_flip_p, dependence_of, strength_of
from ablate.experiments.analysis.verdicts import (
    OPEN,
    Cause,
    Comparison,
    ControlResult,
    Costs,
    OwnNoise,
    RequirementResult,
    VariantVerdict,
    Verdict,
    unit_of_shares,
)
from ablate.experiments.block_numbers import block_list, block_name
from ablate.experiments.design.checks import other_model, other_work
from ablate.experiments.design.gate import Claim
from ablate.experiments.design.metrics import (
    CURVE_METRICS,
    EXACT_METRICS,
    LOSS_METRICS,
    METRICS,
    PER_DEVICE,
    SEED_METRICS,
    WINDOW_METRICS,
)
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.power import Look
from ablate.experiments.design.rule import LOAD_LEVEL, blocks_for_rarest_event, rule_digest, rule_of
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.design.verdict_rule import Primary, Requirement
from ablate.experiments.documents import seal
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.outcomes import GOOD, Decision, FailureClass, VerdictWord
from ablate.experiments.records.circumstances import AttemptRecord, Circumstances
from ablate.experiments.records.receipts import Receipt
from ablate.model.measurements import Metric

HITS_BY_CHANCE = 1
"""Largest surplus of guard hits in one arm that counts as chance."""
_BY_THE_ARM = frozenset(
    {
        FailureClass.TIMEOUT,
        FailureClass.NO_RECEIPT,
        FailureClass.OOM,
        FailureClass.NUMERICS,
        FailureClass.OUTPUT_LIMIT,
        FailureClass.USER_ERROR,
        FailureClass.INFRA_NODE,
    }
)
"""Failures that end the arm's own run, a crash of its worker included. Its slow trials may have failed, so the rerun
may be a lucky one."""
_FROM_OUTSIDE = frozenset({FailureClass.INVALID_MEASUREMENT, FailureClass.DISTURBED})
"""Failures that usually come from outside: a guard, or others' load."""
_NAMED_EARLIER = 3
"""Earlier askings that a note names."""
_WORTH_A_NOTE = 1.005
"""Widening factor from which a note mentions it."""


def judge(plan: Plan, spec: AblationSpec, receipts: Sequence[Receipt], circumstances: Circumstances) -> Verdict:
    """Return the verdict on every variant of `plan`.

    `receipts` are those of finished blocks. A block without a variant's receipt does not count for that variant.
    Missing blocks never lead to adoption, and blocks beyond a look are not missing. `circumstances` are broken
    attempts, earlier askings and A/A blocks. Raises ReceiptError for a receipt outside the plan or a duplicate.
    """
    whole = WholeBlocks(plan, receipts)
    planned = (plan.spec_digest, plan.rule_digest) == (spec.digest, rule_digest(spec))
    changed = None if planned else _OTHER_RULE
    evidence = [evidence_of(arm, whole) for arm in plan.variants]
    judge_one = _Judge(plan, spec, whole, circumstances, evidence)
    comparisons = judge_one.comparisons([one for one in evidence if one.exclusion is None and changed is None])
    fields: dict[str, Any] = {
        "ablation": plan.ablation,
        "spec_digest": plan.spec_digest,
        "rule_digest": plan.rule_digest,
        "rule": _with_percent(rule_of(spec), judge_one.primary),
        "circumstances": circumstances,
        "blocks_planned": len(plan.blocks),
        "blocks_counted": len(whole.blocks),
        "node_class": plan.node_class,
        "seeds": seed_report(plan, receipts, circumstances),
        "baseline": plan.baseline.name,
        "variants": tuple(judge_one(one, changed or one.exclusion, comparisons) for one in evidence),
        "arms": {arm.name: summarise_arm(whole.of(arm.name)) for arm in plan.arms},
        "control": judge_one.control(),
        "own_noise": _own_noise(plan, spec, receipts),
        "largest_micro_batch": largest_micro_batch(plan, whole.of),
    }
    return seal(Verdict(**fields, digest=""))


def _own_noise(plan: Plan, spec: AblationSpec, receipts: Sequence[Receipt]) -> OwnNoise | None:
    if spec.purpose != "calibration":
        return None
    differences = [block.difference for _key, block in aa_blocks_of(plan, spec, receipts)]
    sd = statistics.stdev(differences) if len(differences) > 1 else None
    return OwnNoise(blocks=len(differences), sd_pct=None if sd is None else 100 * sd)


def _with_percent(rule: dict[str, Any], primary: Primary) -> dict[str, Any]:
    """Return the rule with its amounts as percent of the baseline's mean too."""
    percent = {"margin_pct": primary.margin_pct, "adopt_if_pct": primary.threshold_pct}
    return {**rule, "primary": {**rule["primary"], **percent}}


_OTHER_RULE = Exclusion(
    word=VerdictWord.INVALID,
    reason="the spec or its rule is not the planned one; a changed rule is a new ablation",
)


class _Judge:
    """Judges the variants of one plan by one rule."""

    def __init__(
        self,
        plan: Plan,
        spec: AblationSpec,
        whole: WholeBlocks,
        circumstances: Circumstances,
        evidence: Sequence[Evidence],
    ) -> None:
        self._plan = plan
        self._spec = spec
        self._whole = whole
        self.primary = spec.verdict.primary
        if not self.primary.margin.relative:
            own = "loss_val" if self.primary.metric in CURVE_METRICS else self.primary.metric
            self.primary = self.primary.in_percent(unit_of_shares(baseline_mean(whole, own)))
        self._better = declared_directions(plan, self.primary.metric)
        alike = {PER_DEVICE} if len({arm.config.devices for arm in plan.arms}) == 1 else set()
        ours = (name for name in METRICS if name == self.primary.metric or name in set(WINDOW_METRICS) - alike)
        self._compared = (*self._better, *ours)
        self._circumstances = circumstances
        devices = dependence_of(circumstances.admission.calibrations)
        samples = [self._sample(one) for one in evidence if devices and one.exclusion is None]
        self._dependence = strength_of(devices, [sample.likelihood() for sample in samples if sample is not None])
        self._block_minutes = _block_minutes(plan, whole)

    def comparisons(self, evidence: Sequence[Evidence]) -> dict[tuple[str, str], Comparison]:
        """Return by (variant, metric) the comparisons on the primary metric and all metrics of the window."""
        by_place: dict[tuple[str, str], Comparison] = {}
        for metric in self._compared:
            levels = Levels(
                family=len(self._plan.variants),
                alphas={one.arm.name: self._alpha(one) for one in evidence},
                margin_pct=self.primary.margin_pct,
                looks={one.arm.name: self._look(one) for one in evidence},
                dependence=self._dependence,
                better=self._better.get(metric),
            )
            target = self.primary.target
            compared_arms = [one for one in evidence if one.arm.config.has_speed or metric not in WINDOW_METRICS]
            samples = {
                o.arm.name: sample for o in compared_arms if (sample := sample_of(o, metric, target)) is not None
            }
            by_place |= {(arm, metric): compared for arm, compared in compare(metric, samples, levels).items()}
        return by_place

    def control(self) -> ControlResult | None:
        """Return the comparison of the control by the primary metric; None where there is none."""
        arm = self._plan.control
        evidence = None if arm is None else evidence_of(arm, self._whole)
        if evidence is None or evidence.exclusion is not None or evidence.no_baseline is not None:
            return None
        compared = self.comparisons([evidence]).get((evidence.arm.name, self.primary.metric))
        return None if compared is None else ControlResult(arm=evidence.arm.name, primary=compared)

    def _alpha(self, evidence: Evidence) -> float:
        family = self._circumstances.family
        number = family.number if evidence.arm == self._plan.control else family.number_of(evidence.arm.name)
        return self._spec.verdict.level_of(number)

    def _look(self, evidence: Evidence) -> Look:
        return self._spec.design.blocks.look_at(len(evidence.pairs))

    def _level(self, evidence: Evidence) -> float:
        """Return the two-sided level of one variant at its look, after Bonferroni's correction."""
        return self._look(evidence).level(self._alpha(evidence) / len(self._plan.variants))

    def _sample(self, evidence: Evidence) -> Sample | None:
        return sample_of(evidence, self.primary.metric, self.primary.target)

    def __call__(
        self, evidence: Evidence, exclusion: Exclusion | None, comparisons: Mapping[tuple[str, str], Comparison]
    ) -> VariantVerdict:
        name, rule = evidence.arm.name, self.primary
        own = {metric: comparisons[name, metric] for metric in self._compared if (name, metric) in comparisons}
        primary = own.pop(rule.metric, None)
        exact = judge_exactly(evidence, rule) if rule.exact and exclusion is None else None
        not_exact_notes: tuple[str, ...] = ()
        noisy = exact is not None and exact.comparison.problems and rule.metric not in LOSS_METRICS
        if exact is not None and noisy and primary is not None and primary.blocks >= MIN_BLOCKS:
            not_exact_notes = (f"{not_exact(exact.comparison)}: judged by statistics over blocks",)
            exact = None
        if exact is not None:
            primary = None
        requirements = () if exclusion else self._requirements(evidence)
        other = self._other_work(evidence, self._spec.metric)
        answer = with_broken_requirements(self._answer(evidence, exclusion, exact or primary, other), requirements)
        if answer.cause is Cause.TARGET:
            primary = None
        sample = None if primary is None else self._sample(evidence)
        when_met = exact.decision if exact else adopt_or_reject(primary, rule)
        chances = self._chances(name, answer, primary)
        decision = Decision.INVALID if evidence.no_baseline else decide(answer.published, when_met, requirements)
        needed = next((blocks for blocks, chance in chances.items() if chance >= ENOUGH), None)
        kernels = step_kernels(evidence)
        return VariantVerdict(
            arm=name,
            verdict=answer.published,
            measured=answer.measured,
            cause=answer.cause,
            reason=answer.reason,
            missing=answer.missing,
            other_work=other,
            other_model=other_model(evidence.arm, self._plan.baseline),
            costs=self._costs(evidence, exclusion),
            nodes=None if sample is None else scope_of(evidence, sample),
            no_baseline=evidence.no_baseline,
            decision=decision,
            primary=primary,
            exact=exact and exact.comparison,
            shrunk_pct=self._shrunk(primary, decision),
            secondary=tuple(own.values()),
            requirements=requirements,
            gates_live=gates_live(evidence.receipts),
            chances=chances,
            blocks_needed=needed,
            device_minutes_needed=None if needed is None else round(needed * self._block_minutes, 2),
            notes=(
                *_unmet(requirements),
                *not_exact_notes,
                *(exact.notes if exact else self._notes(answer, primary, chances)),
                *(() if sample is None else self._beside(answer, evidence, sample)),
                *program_notes(evidence, rule.metric),
                *_lost_notes(evidence),
                *([kernel_note(kernels)] if kernels else []),
                *self._family_notes(name),
            ),
            contradictions=tuple(contradictions_of(evidence)),
            step_kernels=kernels,
        )

    def _other_work(self, evidence: Evidence, metric: Metric) -> str | None:
        """Say how the work of the arms differs in what `metric` counts; None if it does not."""
        equal = self._spec.workload.steps.equal
        planned = other_work(metric, evidence.arm.config, self._plan.baseline.config, equal=equal)
        return planned or (None if metric.kind == "absolute" else other_tokens(evidence, in_all=metric.kind == "loss"))

    def _costs(self, evidence: Evidence, exclusion: Exclusion | None) -> Costs | None:
        rule = (self._spec.metric, *(self._spec.metric_named(one.metric) for one in self._spec.verdict.require))
        losses = any(metric.kind == "loss" or metric.decides == "curve" for metric in rule)
        if exclusion is not None or not (losses or self._spec.workload.steps.equal == "parameters"):
            return None
        return costs_of(evidence) if evidence.claim is Claim.CHANGES_MODEL else None

    def _shrunk(self, primary: Comparison | None, decision: Decision) -> float | None:
        kept = decision is Decision.ADOPT and self._spec.verdict.session is not None
        return shrunk_pct(primary, self.primary) if kept and primary is not None else None

    def _beside(self, answer: Answer, evidence: Evidence, sample: Sample) -> Iterator[str]:
        """Yield other influences, and that stalls differ or that total and median are further apart than the margin."""
        yield from influences(evidence, self._whole, sample)
        own, base = [one.variant for one in evidence.pairs], [one.baseline for one in evidence.pairs]
        if self._plan.timed and (note := clock_note(own, base)):
            yield note
        if sample.window is None or answer.cause is Cause.STALLS:
            return
        stalls = stalls_differ(sample, self.primary.margin_pct) or estimates_apart(sample, self.primary.margin_pct)
        if stalls is not None:
            yield f"{stalls}; both estimates give the same word"

    def _requirements(self, evidence: Evidence) -> tuple[RequirementResult, ...]:
        node_class = NODE_CLASSES[self._plan.node_class]
        level = self._level(evidence)
        uncalibrated = self._circumstances.admission.refused_because
        return tuple(
            self._of_other_work(entry, evidence)
            or judge_requirement(
                entry,
                evidence,
                node_class,
                level,
                uncalibrated=uncalibrated,
                dependence=self._dependence,
                lost=len(self._lost(evidence.arm.name)),
            )
            for entry in self._spec.verdict.require
        )

    def _of_other_work(self, requirement: Requirement, evidence: Evidence) -> RequirementResult | None:
        """Return the result of a required loss that does not compare the arms; None for any other requirement."""
        if requirement.metric not in SEED_METRICS or requirement.max_value is not None:
            return None
        other = self._other_work(evidence, METRICS[requirement.metric])
        return None if other is None else result_of(requirement, None, f"{other}, so the two are not comparable")

    def _answer(
        self,
        evidence: Evidence,
        exclusion: Exclusion | None,
        primary: Comparison | ExactResult | None,
        other: str | None,
    ) -> Answer:
        if exclusion is not None:
            return as_measured(exclusion.word, exclusion.reason)
        unanswered = self._without_numbers(evidence, primary)
        if unanswered is not None:
            return unanswered
        if isinstance(primary, ExactResult):
            return capped(as_measured(primary.word, primary.reason), Cause.OTHER_WORK, other)
        sample = self._sample(evidence)
        if sample is None or primary is None:
            raise AssertionError("a comparison without a sample")
        word = word_of(primary, self.primary)
        tests = WordTests(level=self._level(evidence), margin_pct=self.primary.margin_pct)
        stalls = stalls_differ(sample, self.primary.margin_pct)
        if stalls is not None and not said_by_median(word, sample, tests, sample.widening(self._dependence)):
            return undecided(Cause.STALLS, stalls)
        reason, scope = sentence(word, primary, self.primary), scope_of(evidence, sample)
        if primary.blocks < FEW_SAMPLES and word in GOOD:
            reason = f"{reason}; {bad_runs(primary.blocks, primary.unit)}"
        if scope is not None:
            reason = f"{reason}; {scope.in_words()}"
        answer = self._with_censored(as_measured(word, reason, open_cause(primary)), evidence)
        answer = capped(answer, Cause.OTHER_WORK, other)
        answer = capped(answer, Cause.CLOCKS, clocks_apart(evidence, self.primary.metric, self.primary.margin_pct))
        answer = capped(answer, Cause.REPEATED_SEEDS, repeated_seeds(evidence, self.primary.metric))
        if word is VerdictWord.SAME:
            margin = self.primary.margin_pct / 100
            answer = capped(answer, Cause.COARSE, step_above(evidence, self.primary.metric, margin))
        over_seeds = self.primary.over_seeds or self.primary.metric in self._better
        answer = capped(answer, Cause.SPREADS, spreads_differ(sample, over_seeds=over_seeds))
        carried = explained_by_carry_over(evidence, self._whole, sample, answer.published, tests)
        answer = capped(answer, Cause.CARRY_OVER, carried)
        answer = capped(answer, Cause.RARE_EVENTS, self._too_few_for_events(primary))
        reruns = _reruns_by(self._circumstances.attempts, evidence.arm.name, self._plan.baseline.name)
        if word is VerdictWord.SAME and self.primary.timed:
            reruns = reruns or self._not_same_with_lost(evidence.arm.name, sample, tests)
        answer = capped(answer, Cause.RERUNS, reruns)
        noise = noise_differs(primary, self._circumstances.admission.calibrations, self.primary.margin_pct)
        judged = self.primary.metric not in (*EXACT_METRICS, *CURVE_METRICS)
        answer = capped(answer, Cause.NOISE, noise if judged else None)
        refused = self._circumstances.admission.refused_because  # only times have the noise that A/A blocks show
        return capped(answer, Cause.UNCALIBRATED, refused if self.primary.timed else None)

    def _without_numbers(self, evidence: Evidence, primary: Comparison | ExactResult | None) -> Answer | None:
        absent = _missing(self._spec, evidence, self._circumstances)
        ratio, off = no_ratio(evidence, self.primary.metric), None if primary else self._censored(evidence)
        if (ratio or off) and not absent:
            return undecided(Cause.NO_RATIO if ratio else Cause.TARGET, ratio or off or "")
        if absent or primary is None:
            return undecided(Cause.MISSING, _reason_missing(absent, primary))
        return None

    def _censored(self, evidence: Evidence) -> str | None:
        return off_the_curves(evidence, self.primary.metric, self.primary.target)

    def _with_censored(self, answer: Answer, evidence: Evidence) -> Answer:
        """Say how trials without the number count; without a word only how many they are."""
        censored = self._censored(evidence)
        if censored is None:
            return answer
        if answer.measured is VerdictWord.INCONCLUSIVE:
            return undecided(Cause.TARGET, censored)
        larger = f"{censored}: runs without the number count at their end, so the change is larger"
        return replace(answer, reason=f"{answer.reason}; {larger}")

    def _lost(self, arm: str) -> list[AttemptRecord]:
        return _lost_trials(self._circumstances.attempts, arm, self._plan.baseline.name)

    def _not_same_with_lost(self, arm: str, sample: Sample, tests: WordTests) -> str | None:
        """Say that trials were cut short without which sameness is not proved if they were the slowest; or None."""
        lost = self._lost(arm)
        widening = sample.widening(self._dependence)
        worst = [one.fit().widened(widening) for one in sample.with_lost(len(lost))]
        if all(holds(VerdictWord.SAME, one, tests) for one in worst):
            return None
        ended = f"{len(lost)} {'attempt' if len(lost) == 1 else 'attempts'} at its or the baseline's trials ended early"
        first = f"{block_name(lost[0].block_index)}, {lost[0].failure_class}: {lost[0].message}"
        return f"{ended} ({first}); if those trials were twice as slow as the slowest, the arms are not the same"

    def _too_few_for_events(self, primary: Comparison) -> str | None:
        needed, share = blocks_for_rarest_event(self._spec), self._spec.verdict.rarest_event
        if needed is None or primary.blocks >= needed:
            return None
        return f"events in {share:g} % of one arm's runs need {needed:,} {primary.unit}, {primary.blocks:,} counted"

    def _chances(self, arm: str, answer: Answer, primary: Comparison | None) -> dict[int, float]:
        if answer.cause not in OPEN or primary is None or self._coarse(primary):
            return {}
        level = self._spec.verdict.level_of(self._circumstances.family.number_of(arm) + 1) / len(self._plan.variants)
        return chances_of(primary, level=level, margin_pct=self.primary.margin_pct)

    def _coarse(self, primary: Comparison) -> bool:
        """Return whether validations are so far apart that more seeds may not answer."""
        return (primary.bias_pct or 0.0) > self.primary.margin_pct / 2

    def _notes(self, answer: Answer, primary: Comparison | None, chances: Mapping[int, float]) -> Iterator[str]:
        threshold = self.primary.threshold_pct
        if primary is not None and answer.measured in GOOD and primary.blocks >= FEW_SAMPLES:
            yield bad_runs(primary.blocks, primary.unit)
        if primary is not None and answer.measured is VerdictWord.BETTER and gain_pct(primary) < threshold:
            yield f"better by {gain_pct(primary):.2f} %, below the {threshold:.4g} % from which the rule adopts"
        if primary is not None and chances and max(chances.values()) < ENOUGH:
            yield f"no number of blocks up to {most_blocks(primary)} would answer this with a chance of {ENOUGH:.0%}"
        if primary is not None and primary.bias_pct is not None:
            yield f"curves are linear between validations; the interval allows for an error of {primary.bias_pct:.2g} %"
            if self._coarse(primary):
                yield "that is more than half of the margin: validate more often (val_every)"
        calibrations = () if self.primary.over_seeds else self._circumstances.admission.calibrations
        if primary is not None and answer.cause is not Cause.NOISE and (more := noisier(primary, calibrations)):
            yield f"blocks scatter {more[0]:.3g} times as much as the A/A blocks (F test, p {more[1]:.2g})"
        if primary is not None and primary.widened >= _WORTH_A_NOTE:
            wide = f"{primary.widened:.2f} times as wide as without that"
            yield f"neighbouring blocks may resemble each other (autocorrelation), so the interval is {wide}"

    def _family_notes(self, arm: str) -> Iterator[str]:
        """Yield the number of this asking; every earlier ablation that ran anything counts, even without a sample."""
        session = self._spec.verdict.session
        if session is not None:
            yield f"proposal {session.proposal} of session '{session.name}', tested at {100 * session.level:.2g} %"
        number = self._circumstances.family.number_of(arm)
        earlier = [one for one in self._circumstances.family.earlier if arm in one.asked]
        if number > 1:
            named = ", ".join(f"'{one.name}' ({one.state})" for one in earlier[-_NAMED_EARLIER:])
            counted = session is None and not self.primary.exact
            level = f", tested at {100 * self._spec.verdict.level_of(number):.2g} %" if counted else ""
            yield f"asking {number} of this question{level}; before it: {named}"


def _unmet(requirements: Sequence[RequirementResult]) -> Iterator[str]:
    for one in requirements:
        if not one.passed:
            yield f"requirement {'not decided' if one.undecided else 'not met'}: {one.metric} {one.rule}: {one.detail}"


def _lost_notes(evidence: Evidence) -> Iterator[str]:
    """Yield which blocks do not count because the baseline failed."""
    if evidence.lost:
        blocks, first = sorted(pair.block_index for pair in evidence.lost), evidence.lost[0].baseline
        one = len(blocks) == 1
        where = f"block{'' if one else 's'} {block_list(blocks)} {'does' if one else 'do'} not count"
        yield f"{where}: the baseline did not measure ({first.outcome}: {first.message})"


def _missing(spec: AblationSpec, evidence: Evidence, circumstances: Circumstances) -> str | None:
    """Return which blocks are missing and why; None if the blocks that count are the first ones up to a look.

    Blocks that were lost with their baseline are not missing if enough others count.
    """
    looks, counted = spec.design.blocks.schedule, sorted(pair.block_index for pair in evidence.pairs)
    lost = {pair.block_index for pair in evidence.lost}
    if any(counted == [index for index in range(look) if index not in lost] for look in looks):
        return None
    due = next((look for look in looks if not counted or look > counted[-1]), looks[-1])
    why = "; ".join(_why(set(range(due)) - set(counted), circumstances))
    return f"{len(counted)} of {due} planned blocks counted{f': {why}' if why else '; missing data fails'}"


def _why(absent: Set[int], circumstances: Circumstances) -> Iterator[str]:
    """Yield why blocks did not run, and how the absent ones broke."""
    if circumstances.not_run is not None:
        yield circumstances.not_run
    broken = [attempt for attempt in circumstances.attempts if attempt.block_index in absent]
    if broken:
        places, last = sorted({attempt.block_index for attempt in broken}), broken[-1]
        blocks = "blocks" if len(places) > 1 else "block"
        yield f"{blocks} {block_list(places)} broke ({last.failure_class}: {last.message})"


def _reason_missing(absent: str | None, primary: Comparison | ExactResult | None) -> str:
    """Return the missing blocks, and the existing repeats that differ."""
    exact = primary.comparison if isinstance(primary, ExactResult) else None
    differ = [not_exact(exact)] if exact is not None and exact.problems else []
    return "; ".join([absent or "a trial has no value; missing data fails", *differ])


def _reruns_by(attempts: Sequence[AttemptRecord], variant: str, baseline: str) -> str | None:
    """Return the reruns that one of two compared arms may have caused, or None.

    One trial that failed by itself is enough, and one worker that vanished during a trial of theirs, or during a trial
    of an unknown arm. Hits of guards count if one arm may have at least two more of them than the other; a hit without
    an arm may be of either. Others' load counts if it hit one arm more often than chance explains.
    """
    own = _lost_trials(attempts, variant, baseline)
    loads = [one for one in attempts if one.arm in (variant, baseline) and one.failure_class is FailureClass.DISTURBED]
    if (unequal := _loads_differ(loads, variant, baseline)) is not None:
        return unequal
    hits = [attempt for attempt in own if attempt.failure_class in _FROM_OUTSIDE]
    unknown = sum(hit.arm is None for hit in hits)
    surplus = abs(sum((hit.arm == variant) - (hit.arm == baseline) for hit in hits)) + unknown
    by_the_arm = [one for one in own if one.failure_class in _BY_THE_ARM and (one.arm is not None or one.vanished)]
    reruns = by_the_arm or (hits if surplus > HITS_BY_CHANCE else [])
    if not reruns:
        return None
    first = reruns[0]
    arm = "an unknown arm" if first.arm is None else f"arm '{first.arm}'"
    what = f"attempt {first.number} at {block_name(first.block_index)} ended with {arm}"
    more = f", and {len(reruns) - 1} more like it" if len(reruns) > 1 else ""
    return f"{what} ({first.failure_class}: {first.message}){more}"


def _lost_trials(attempts: Sequence[AttemptRecord], variant: str, baseline: str) -> list[AttemptRecord]:
    """Return the attempts that ended with a trial that may be of either arm, except by others' load."""
    own = [attempt for attempt in attempts if attempt.arm in (variant, baseline, None)]
    return [attempt for attempt in own if attempt.failure_class is not FailureClass.DISTURBED]


def _loads_differ(loads: Sequence[AttemptRecord], variant: str, baseline: str) -> str | None:
    """Say that others' load ended attempts in one arm's trials more often than chance explains, or return None."""
    hits = [sum(one.arm == arm for one in loads) for arm in (variant, baseline)]
    p = count_flip_p([1] * hits[0] + [-1] * hits[1])
    if p > LOAD_LEVEL:
        return None
    return f"others' load ended {hits[0]} attempts in its trials and {hits[1]} in the baseline's (sign test, p {p:.2g})"


def _block_minutes(plan: Plan, whole: WholeBlocks) -> float:
    """Return device minutes of a mean block: the sum over the arms of their trials' mean wall time."""
    walls = ([receipt.wall_s for receipt in whole.of(arm.name)] for arm in plan.arms)
    return plan.busy_devices * math.fsum(math.fsum(wall) / len(wall) for wall in walls if wall) / 60
