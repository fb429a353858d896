"""Sentences of a verdict: the lead on all variants, and the result and the remarks on each variant."""

import math
from collections.abc import Iterator, Sequence

from ablate.experiments.analysis.answer import FEW_SAMPLES, bad_runs, gain_pct
from ablate.experiments.analysis.verdicts import (
    OPEN,
    Cause,
    Comparison,
    ExactComparison,
    LargestMicroBatch,
    VariantVerdict,
    Verdict,
)
from ablate.experiments.block_numbers import block_list
from ablate.experiments.design.metrics import METRICS, PEAK_METRICS, SEED_METRICS
from ablate.experiments.outcomes import GOOD, Decision, FailureClass, Outcome, VerdictWord
from ablate.experiments.records.circumstances import NOT_REGISTERED, AttemptRecord
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.outlook import needs_many

WITHOUT_STATISTICS: dict[VerdictWord, str] = {
    VerdictWord.INVALID: "has no valid measurement",
    VerdictWord.REFUSED: "was refused: a requested gate or kernel was not live",
    VerdictWord.OOM: "ran out of memory",
    VerdictWord.TIMEOUT: "exceeded the time limit of a trial",
    VerdictWord.FAILED: "failed before it was measured",
}

NO_ANSWER = (VerdictWord.TIMEOUT, VerdictWord.FAILED)
"""Verdicts of arms whose trials did not finish. Running out of memory is not among them: it is a result."""

NOT_COMPARED = "losses not compared"

_WITHOUT_NUMBERS = (Cause.MISSING, Cause.NO_RATIO, Cause.TARGET)
"""Causes that leave nothing to compare."""

LEADS: dict[Decision, str] = {
    Decision.ADOPT: "adopt {}",
    Decision.REJECT: "do not adopt {}",
    Decision.SAME: "no practical difference for {}",
    Decision.INCONCLUSIVE: "not decided for {}",
    Decision.INVALID: "no valid comparison of {}",
}
"""Clauses of the leading sentence, in order."""


def lead(variants: Sequence[VariantVerdict], adopt_if_pct: float) -> str:
    """Return the decisions on all variants in one sentence, with obstacles to a comparison in brackets.

    `adopt_if_pct` is the gain from which the rule adopts.
    """
    finished = [v for v in variants if v.verdict not in NO_ANSWER]
    arms = {decision: [_named(v, adopt_if_pct) for v in finished if v.decision is decision] for decision in LEADS}
    clauses = [_clause(decision, names) for decision, names in arms.items() if names]
    open_ones = [v for v in finished if v.decision is Decision.INCONCLUSIVE]
    lacking = {missing(v) if v.cause is Cause.MISSING else "" for v in open_ones}
    clauses += lacking if len(lacking) == 1 and "" not in lacking else ()
    clauses += [f"{variant.arm}: no answer ({variant.verdict})" for variant in variants if variant.verdict in NO_ANSWER]
    return f"{wording.capitalised('; '.join(clauses))}."


def of_noise(verdict: Verdict) -> str | None:
    """Return the lead of an A/A ablation; None for any other."""
    noise = verdict.own_noise
    if noise is None:
        return None
    blocks = f"{wording.share(noise.blocks, verdict.blocks_planned)} A/A blocks count"
    if noise.sd_pct is None:
        return f"{blocks}; two are needed to show noise."
    return (
        f"{blocks}; two equal arms differ with a standard deviation of {wording.size_percent(noise.sd_pct)} per block."
    )


def without_baseline(verdict: Verdict) -> str | None:
    """Return the lead of a verdict whose baseline leaves nothing to compare; None if there is a baseline."""
    ends = [variant.no_baseline for variant in verdict.variants]
    if None in ends:
        return None
    arms: dict[str, list[str]] = {}
    for variant in verdict.variants:
        arms.setdefault(_own_end(verdict, variant), []).append(variant.arm)
    each = [f"{wording.listed(names)} {end}" for end, names in arms.items()]
    return f"The baseline {ends[0]}, so there is nothing to compare; {'; '.join(each)}."


def of_largest_micro_batch(verdict: Verdict, largest: LargestMicroBatch) -> str:
    """Say which number of rows fits, whether it pays, and which one does not fit."""
    arm, too_many = largest.arm, largest.too_many_arm
    variant = next((one for one in verdict.variants if one.arm == arm), None)
    compared = () if variant is None else (variant.primary, *variant.secondary)
    speed = next((one for one in compared if one is not None and one.metric == "tokens_per_s"), None)
    gain = "" if speed is None else f": {moved(speed)} {_interval(speed)}"
    peak, needed = (wording.gib(verdict.arms[name].peak_allocated_bytes) for name in (arm, too_many))
    rows = wording.counted(largest.rows, "row")
    return (
        f"The largest micro-batch that fits has {rows} ({arm}, peak {peak}){gain}. "
        f"{largest.too_many_rows:,} rows ({too_many}) ran out of memory at {needed}."
    )


def _own_end(verdict: Verdict, variant: VariantVerdict) -> str:
    ran = set(verdict.arms[variant.arm].outcomes) <= {Outcome.MEASURED}
    return "ran" if ran else WITHOUT_STATISTICS[variant.verdict]


def _clause(decision: Decision, arms: list[str]) -> str:
    """Return a clause of the lead. Variants were compared with the baseline only, so only one can be adopted."""
    one_of = "one of " if decision is Decision.ADOPT and len(arms) > 1 else ""
    return LEADS[decision].format(f"{one_of}{wording.listed(arms)}")


def _named(variant: VariantVerdict, adopt_if_pct: float) -> str:
    if variant.no_baseline is not None:
        return f"{variant.arm} (the baseline {variant.no_baseline})"
    if variant.cause is Cause.OTHER_WORK:
        return f"{variant.arm} ({Cause.OTHER_WORK}: {variant.other_work})"
    usable = variant.decision in (Decision.ADOPT, Decision.SAME)
    where = None if variant.nodes is None else variant.nodes.in_words()
    limits = (where, confound(variant)) if usable else _rejected_because(variant, adopt_if_pct)
    text = "; ".join(filter(None, limits))
    return f"{variant.arm} ({text})" if text else variant.arm


def improvement_pct(variant: VariantVerdict) -> float:
    """Return the effect in percent, positive for an improvement, the least over the seeds; -inf without one."""
    if variant.exact is not None and variant.exact.seeds:
        return min(variant.exact.gains_pct)
    return -math.inf if variant.primary is None else gain_pct(variant.primary)


def _rejected_because(variant: VariantVerdict, adopt_if_pct: float) -> Iterator[str]:
    """Yield why a variant is rejected that is not worse: broken requirements, or a gain that is too small."""
    if variant.decision is not Decision.REJECT or variant.measured is VerdictWord.WORSE:
        return
    broken = [one for one in variant.requirements if not one.passed and not one.undecided]
    yield from (f"{wording.metric(one.metric)} {one.rule} is not met" for one in broken)
    gain = improvement_pct(variant)
    if not broken and variant.measured is VerdictWord.BETTER and gain < adopt_if_pct:
        least = wording.plain_percent(adopt_if_pct)
        yield f"better by {wording.size_percent(gain)}, below the {least} from which the rule adopts"


def signers(verdict: Verdict) -> Iterator[str]:
    """Yield which key signed which blocks."""
    for signer in verdict.circumstances.signers:
        blocks = wording.shorten(block_list(sorted(signer.blocks)), wording.LONGEST_BLOCK_LIST)
        yield f"blocks {blocks} of {signer.name}: signed by {signer.key or 'nobody'}"


def registration(verdict: Verdict) -> str | None:
    """Return when a service registered a carried plan; None without one."""
    carried = verdict.circumstances.carried
    if carried is None or carried.registered_at is None:
        return None
    unchecked = "" if carried.compared else ", as the plan says; its service compares it at the import"
    return f"plan registered {wording.moment(carried.registered_at)}{unchecked}"


def seeds(verdict: Verdict) -> str | None:
    """Return the seeds of a verdict, how they came about, and how to repeat exactly these; None where none is used."""
    own = verdict.seeds
    if not own.used or not own.taken:
        return None
    again = f"to repeat these: --seeds {','.join(map(str, own.used))}"
    return f"{wording.counted(len(own.used), 'seed')} {ORIGINS[own.origin]}; {again}"


ORIGINS = {
    "chosen": "chosen by the author of the spec",
    "drawn": "drawn after the spec was fixed",
    "unregistered": "drawn without a service, nobody knows how often",
}


def origin_problems(verdict: Verdict) -> Iterator[str]:
    """Yield what makes the origin of the numbers, or the number of tries, unproved."""
    carried = verdict.circumstances.carried
    if carried is not None and carried.registered_at is None:
        yield wording.capitalised(NOT_REGISTERED)
    unsigned = sum(
        block.signed_by is None for one in verdict.circumstances.admission.calibrations for block in one.samples
    )
    if unsigned:
        yield f"No signer is known for {wording.counted(unsigned, 'A/A block')} of the calibration"
    nobody = sorted({signer.name for signer in verdict.circumstances.signers if signer.key is None})
    if nobody:
        yield f"Nobody signed for {wording.listed(nobody)}: anybody who had the files could have changed them"


def missing(variant: VariantVerdict) -> str:
    """Return which blocks or values are missing, and why."""
    return wording.with_minus(variant.missing or Cause.MISSING)


def confound(variant: VariantVerdict) -> str | None:
    """Say how a variant trains differently, and whether losses were compared; None if it does not."""
    if variant.other_model is None:
        return None
    losses = "" if losses_compared(variant) else f", {NOT_COMPARED}"
    return f"trains differently: {variant.other_model}{losses}"


def losses_compared(variant: VariantVerdict) -> bool:
    """Return whether the rule asks for a loss of this variant."""
    decided = {one.metric for one in (variant.primary, variant.exact) if one is not None}
    required = {result.metric for result in variant.requirements if result.compared}
    return variant.cause is Cause.TARGET or not (decided | required).isdisjoint(SEED_METRICS)


def sentence(verdict: Verdict, variant: VariantVerdict) -> str:
    """Return the result of a variant; broken requirements come first."""
    return " ".join((*_broken_requirements(variant), _result(verdict, variant)))


def _broken_requirements(variant: VariantVerdict) -> Iterator[str]:
    for result in variant.requirements:
        if result.exact and not result.passed:
            yield f"It breaks a requirement: {wording.metric(result.metric)}, {result.rule}: {result.detail}."


def _result(verdict: Verdict, variant: VariantVerdict) -> str:
    margin = wording.plain_percent(verdict.rule["primary"]["margin_pct"])
    if variant.no_baseline is not None:
        own = f"{variant.arm} {_own_end(verdict, variant)}"
        return f"The baseline {variant.no_baseline}, so there is nothing to compare; {own}."
    if variant.cause in _WITHOUT_NUMBERS:
        why = missing(variant) if variant.cause is Cause.MISSING else wording.with_minus(variant.reason)
        return f"Not decided: {why}."
    if variant.exact is not None:
        other = _other_work(variant)
        prefix = f"Not decided: {other}. The values alone: " if variant.cause is Cause.OTHER_WORK else ""
        return f"{prefix}{_exact(variant.exact, variant.measured, margin)}"
    if variant.verdict in WITHOUT_STATISTICS or variant.primary is None:
        return f"It {WITHOUT_STATISTICS.get(variant.verdict, 'has no numbers')}."
    if variant.cause is not None:
        return f"Not decided: {_undecided(verdict, variant, variant.primary, margin)}."
    proof = _proof(variant.verdict, variant.primary, margin)
    return f"{wording.capitalised('; '.join((proof, *_limits(variant, variant.primary))))}."


def _limits(variant: VariantVerdict, comparison: Comparison) -> Iterator[str]:
    """Yield what a published verdict does not speak of."""
    if variant.verdict in GOOD and comparison.blocks < FEW_SAMPLES:
        yield bad_runs(comparison.blocks, comparison.unit)
    if (shrunk := shrunk_percent(variant)) is not None:
        yield f"kept effects tend to be too large, without their mean luck it is {shrunk}"
    if variant.nodes is not None:
        yield f"all of this is {variant.nodes.in_words()} only"


def shrunk_percent(variant: VariantVerdict) -> str | None:
    """Return the effect of a kept proposal without luck as text; None for others, and where it looks the same."""
    if variant.shrunk_pct is None or variant.primary is None:
        return None
    shrunk = wording.percent(variant.shrunk_pct)
    return None if shrunk == wording.percent(variant.primary.delta_pct) else shrunk


def _proof(word: VerdictWord, comparison: Comparison, margin: str) -> str:
    """Return the numbers that support a verdict, or a difference that may be within the margin."""
    if word is VerdictWord.SAME:
        change = f"the change is {wording.percent(comparison.delta_pct)} {_interval(comparison)}"
        return f"{wording.metric(comparison.metric)} is the same within the margin of {margin}: {change}"
    beyond = f"that is more than the margin of {margin}"
    if word is VerdictWord.INCONCLUSIVE:
        beyond = f"the difference is proved, but not that it exceeds the margin of {margin}"
    return f"{moved(comparison)} {_interval(comparison)}; {beyond}"


def moved(comparison: Comparison) -> str:
    """Say by how much a metric is higher or lower, for example "throughput is 2.41 % higher"."""
    return _is(wording.metric(comparison.metric), comparison.delta_pct)


def _is(name: str, change_pct: float) -> str:
    size = wording.size_percent(abs(change_pct))
    return f"{name} is {size} {'higher' if change_pct > 0 else 'lower'}"


def _interval(comparison: Comparison) -> str:
    interval = wording.interval(comparison.ci_low_pct, comparison.ci_high_pct)
    blocks = wording.counted(comparison.blocks, comparison.unit.removesuffix("s"))
    return f"({interval} with {wording.confidence(comparison.alpha)} confidence, {blocks})"


def _undecided(verdict: Verdict, variant: VariantVerdict, comparison: Comparison, margin: str) -> str:
    """Say why a variant with all its numbers is undecided."""
    if variant.cause in (Cause.ABOVE_ZERO, Cause.BELOW_ZERO):
        return _proof(variant.measured, comparison, margin)
    if variant.cause is Cause.NOT_PROVED:
        change = f"{wording.metric(comparison.metric)} changed by {wording.percent(comparison.delta_pct)}"
        proof = f"which proves neither a difference nor sameness within the margin of {margin}"
        return f"{change} {_interval(comparison)}, {proof}"
    if variant.cause is Cause.STALLS:
        return _stalls(comparison)
    reasons: dict[Cause | None, str] = {
        Cause.SPREADS: "one arm's trials scatter far more than the other's, so no test keeps its error rate",
        Cause.NOISE: "the blocks scatter far more than the A/A blocks, which therefore do not show their noise",
        Cause.CARRY_OVER: "trials of this arm change the trial after them, and without that the verdict is not proved",
        Cause.RARE_EVENTS: "the runs so far are too few for the rarest event of the rule",
        Cause.RERUNS: "blocks were rerun, and one of the arms may be the cause",
        Cause.UNCALIBRATED: verdict.circumstances.admission.refused_because or "the noise of this device is unknown",
        Cause.OTHER_WORK: _other_work(variant),
        Cause.CLOCKS: "the worker's clock gives another effect than the programs' own clocks",
        Cause.COARSE: "the metric comes in steps above the margin, so no sameness within it can show",
        Cause.REPEATED_SEEDS: "numbers are the same with several seeds, so their blocks repeat one run",
    }
    proof = _proof(variant.measured, comparison, margin)
    return f"{reasons[variant.cause]}. The samples say '{variant.measured}': {proof}"


def _stalls(comparison: Comparison) -> str:
    total = wording.percent(comparison.delta_pct)
    median = wording.NOTHING if comparison.by_median_pct is None else wording.percent(comparison.by_median_pct)
    both = f"{total} in total, {median} by median step"
    if comparison.outlier_steps == (0, 0):
        return f"the steps of the two arms are distributed differently, without outliers: {both}"
    baseline, variant = comparison.outlier_steps or (0, 0)
    counts = f", {variant} slow steps against {baseline}" if comparison.outlier_steps else ""
    return f"a few slow steps make the difference, not all steps: {both}{counts}"


def _other_work(variant: VariantVerdict) -> str:
    return f"{variant.other_work}, so the two are not comparable"


_SIDES = {
    VerdictWord.BETTER: "; that is more than the margin of {}",
    VerdictWord.WORSE: "; that is more than the margin of {}",
    VerdictWord.SAME: "; that is within the margin of {}",
}


def _exact(exact: ExactComparison, word: VerdictWord, margin: str) -> str:
    name = wording.capitalised(wording.metric(exact.metric))
    if exact.problems:
        return f"{name} differs between repeats, so it cannot be compared exactly."
    if exact.unrepeated:
        return f"{name} ran only once with seed {exact.unrepeated[0]}, and an exact comparison needs a repeat."
    blocks = wording.counted(exact.blocks, "block")
    if not any(pair.change for pair in exact.seeds):
        return f"{name} is the same, bit for bit, over {blocks}."
    values = [wording.quantities(exact.metric, (pair.variant, pair.baseline)) for pair in exact.seeds]
    pairs = dict.fromkeys(f"{own} instead of {base}" for own, base in values)
    first = exact.seeds[0].change_pct
    if METRICS[exact.metric].kind == "loss":
        change, side = f"{name} is not bit-identical", ""
    else:
        change = _is(name, first) if len(pairs) == 1 and first is not None else f"{name} changes"
        side = _SIDES.get(word, "").format(margin)
    return f"{change}: {', '.join(pairs)}, the same in every repeat over {blocks}{side}."


def says_why(variant: VariantVerdict) -> bool:
    """Return whether the sentence has the whole reason: numbers, or the missing blocks."""
    exact = variant.exact
    has_numbers = variant.primary is not None if exact is None else not exact.problems
    return has_numbers or variant.cause in _WITHOUT_NUMBERS


def broken_attempts(verdict: Verdict) -> Iterator[str]:
    """Yield one line per arm and failure class: the broken attempts, their blocks, and why."""
    groups: dict[tuple[str | None, FailureClass], list[AttemptRecord]] = {}
    for attempt in verdict.circumstances.attempts:
        groups.setdefault((attempt.arm, attempt.failure_class), []).append(attempt)
    for (arm, failure), own in groups.items():
        blocks = sorted({attempt.block_index for attempt in own})
        who = f"arm {arm}" if arm else "no arm in particular"
        where = f"block{'s' if len(blocks) > 1 else ''} {block_list(blocks)}"
        why = own[0].message.removeprefix(f"arm '{arm}': ")
        yield f"{wording.counted(len(own), 'broken attempt')} in {where}: {who}, {failure}: {why}"


def remarks(verdict: Verdict, variant: VariantVerdict) -> tuple[str, ...]:
    """Return remedies, and the verdict's own notes."""
    return (*_help(verdict, variant), *variant.contradictions, *variant.notes)


def _help(verdict: Verdict, variant: VariantVerdict) -> Iterator[str]:
    if variant.cause is Cause.OTHER_WORK:
        fair = "decide by a metric that counts the work done, such as tokens_per_s, or give both arms equal work"
        if verdict.rule["primary"]["metric"] in SEED_METRICS:
            fair = "train both arms on equal tokens or with equal FLOPs, and take the loss over equal rows"
        yield f"To compare it, {fair}."
    if variant.cause is Cause.TARGET:
        yield "A target between the first and the last validation of every trial would have a number."
    exact = variant.exact
    if exact and exact.metric in PEAK_METRICS and exact.seeds and not any(pair.change for pair in exact.seeds):
        yield "The peak is the same to the byte: memory that its gates change is not in use at the peak."
    model = None if variant.verdict in WITHOUT_STATISTICS else confound(variant)
    if model is not None and variant.cause is not Cause.OTHER_WORK:
        bound = "" if losses_compared(variant) else " To let a loss decide too, require it: not_worse_by."
        yield f"{wording.capitalised(model)}.{bound}"
    if variant.costs is not None:
        yield f"Its training took, against the baseline's: {', '.join(variant.costs.in_words())}."
    command = verdict.circumstances.admission.mended_by
    refused = not verdict.calibrated and variant.cause in OPEN | {Cause.UNCALIBRATED}
    if refused and command:
        yield f"To calibrate: {command}."
    if variant.blocks_needed is not None and not needs_many(verdict, variant):
        yield f"{'Once the device is calibrated, another' if refused else 'Another'} {_next(variant)}"


def _next(variant: VariantVerdict) -> str:
    """Return the chance and the cost of another ablation with `blocks_needed` blocks."""
    needed = variant.blocks_needed or 0
    chance, cost = variant.chances.get(needed), variant.device_minutes_needed
    likely = "" if chance is None else f" with a chance of {wording.plain_percent(100 * chance)}"
    minutes = "" if cost is None else f" and take about {wording.counted(round(cost), 'device minute')}"
    answer = f"ablation of {wording.counted(needed, 'block')} would answer{likely}{minutes}."
    if variant.primary is None:
        return answer
    noise = wording.size_percent(variant.primary.sd_pct)
    if variant.primary.better is not None or variant.primary.baseline is not None:
        return f"{answer} The standard deviation between seeds is {noise}; each block needs a seed of its own."
    fewer = "a quieter machine or a longer window (workload.steps.timed) needs fewer blocks"
    return f"{answer} The standard deviation between blocks is {noise}; {fewer}."
