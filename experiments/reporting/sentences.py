"""What a verdict says in sentences: the lead on all variants, and for each what happened and what would help."""

from collections.abc import Callable, Iterator, Sequence

from experiments.analysis.verdicts import Cause, Comparison, ExactComparison, VariantVerdict, Verdict
from experiments.block_numbers import block_list
from experiments.design.metrics import LOSS_METRICS, METRICS, PEAK_METRICS
from experiments.outcomes import Decision, FailureClass, Outcome, VerdictWord
from experiments.records.circumstances import AttemptRecord
from experiments.reporting import wording

WITHOUT_STATISTICS: dict[VerdictWord, str] = {
    VerdictWord.INVALID: "has no valid measurement",
    VerdictWord.REFUSED: "was refused: a gate that was asked for was not live",
    VerdictWord.OOM: "ran out of memory",
    VerdictWord.TIMEOUT: "took longer than a trial may",
    VerdictWord.FAILED: "failed before it could be measured",
}

NO_ANSWER = (VerdictWord.TIMEOUT, VerdictWord.FAILED)
"""Words of arms that are not adopted because their trials did not come to an end: nothing was measured as bad. That
an arm does not fit into memory is a result."""

LEADS: dict[Decision, str] = {
    Decision.ADOPT: "adopt {}",
    Decision.REJECT: "do not adopt {}",
    Decision.SAME: "no practical difference for {}",
    Decision.INCONCLUSIVE: "not decided for {}",
    Decision.INVALID: "no valid comparison of {}",
}
"""Decisions as clauses of the leading sentence, in its order."""


def lead(variants: Sequence[VariantVerdict]) -> str:
    """Return the decisions on all variants in one sentence, with what keeps one from being compared in brackets."""
    done = [v for v in variants if v.verdict not in NO_ANSWER]
    arms = {d: [_named(v) for v in done if v.decision is d] for d in LEADS}
    clauses = [_clause(decision, arms[decision]) for decision in LEADS if arms[decision]]
    lacking = {missing(v) if v.cause is Cause.MISSING else "" for v in done if v.decision is Decision.INCONCLUSIVE}
    clauses += lacking if len(lacking) == 1 and "" not in lacking else ()
    clauses += [f"{variant.arm}: no answer ({variant.verdict})" for variant in variants if variant.verdict in NO_ANSWER]
    return f"{_capital('; '.join(clauses))}."


def without_baseline(verdict: Verdict) -> str | None:
    """Return the lead where the baseline leaves nothing to compare any variant with: how it ended, and what ran."""
    ended = [variant.no_baseline for variant in verdict.variants]
    if None in ended:
        return None
    arms: dict[str, list[str]] = {}
    for variant in verdict.variants:
        arms.setdefault(_own_end(verdict, variant), []).append(variant.arm)
    each = [f"{wording.listed(own)} {said}" for said, own in arms.items()]
    return f"The baseline {ended[0]}: nothing can be compared; {'; '.join(each)}."


def _own_end(verdict: Verdict, variant: VariantVerdict) -> str:
    """Say how a variant ended that has nothing to be compared with."""
    ran = set(verdict.arms[variant.arm].outcomes) <= {Outcome.MEASURED}
    return "ran" if ran else WITHOUT_STATISTICS[variant.verdict]


def _clause(decision: Decision, arms: list[str]) -> str:
    """Return a clause of the lead; variants were held against the baseline alone, so of several one can be adopted."""
    one_of = "one of " if decision is Decision.ADOPT and len(arms) > 1 else ""
    return LEADS[decision].format(f"{one_of}{wording.listed(arms)}")


def _named(variant: VariantVerdict) -> str:
    if variant.no_baseline is not None:
        return f"{variant.arm} (the baseline {variant.no_baseline})"
    if variant.cause is Cause.OTHER_WORK:
        return f"{variant.arm} ({Cause.OTHER_WORK}: {variant.other_work})"
    model = confound(variant) if variant.decision in (Decision.ADOPT, Decision.SAME) else None
    return variant.arm if model is None else f"{variant.arm} ({model})"


def missing(variant: VariantVerdict) -> str:
    """Say which blocks or values are missing, and why."""
    return wording.with_minus(variant.missing or Cause.MISSING)


def confound(variant: VariantVerdict) -> str | None:
    """Return that a variant is another numerical model, and whether its losses were compared; None where it is not."""
    if variant.other_model is None:
        return None
    losses = "" if _losses_compared(variant) else ", losses not compared"
    return f"another numerical model: {variant.other_model}{losses}"


def _losses_compared(variant: VariantVerdict) -> bool:
    return any(found.compared and found.metric in LOSS_METRICS for found in variant.requirements)


def sentence(verdict: Verdict, variant: VariantVerdict) -> str:
    """Return what happened to a variant, as a colleague would say it; what it must not do comes first."""
    return " ".join((*_broken_requirements(variant), _finding(verdict, variant)))


def _broken_requirements(variant: VariantVerdict) -> Iterator[str]:
    for found in variant.requirements:
        if found.exact and not found.passed:
            yield f"It breaks a requirement: {wording.metric(found.metric)}, {found.rule}: {found.detail}."


def _finding(verdict: Verdict, variant: VariantVerdict) -> str:
    if variant.no_baseline is not None:
        own = f"{variant.arm} {_own_end(verdict, variant)}"
        return f"The baseline {variant.no_baseline}: nothing can be compared; {own}."
    if variant.cause is Cause.MISSING:
        return f"Not decided: {missing(variant)}."
    if variant.exact is not None:
        other = f"Not decided: {_other_work_words(variant)}. The values alone: " if _is_other_work(variant) else ""
        return f"{other}{_exact(variant.exact, variant.measured, _margin(verdict))}"
    if variant.verdict in WITHOUT_STATISTICS or variant.primary is None:
        return f"It {WITHOUT_STATISTICS.get(variant.verdict, 'has no numbers')}."
    if variant.cause is not None:
        return f"Not decided: {_OPEN[variant.cause](verdict, variant, variant.primary)}."
    return f"{_capital(_proved(variant.verdict, variant, variant.primary, _margin(verdict)))}."


def _proved(word: VerdictWord, variant: VariantVerdict, found: Comparison, margin: str) -> str:
    """Say what a word other than inconclusive stands on."""
    if word is VerdictWord.SAME:
        name, where = (
            wording.metric(found.metric),
            f"the change is {wording.percent(found.delta_pct)} {_interval(found)}",
        )
        return f"{name} is the same within the margin of {margin}: {where}"
    beyond = (
        f"that is more than the margin of {margin}"
        if variant.beyond_margin
        else f"that is a real difference; by more than the margin of {margin} is the best guess, not proved"
    )
    return f"{moved(found)} {_interval(found)}; {beyond}"


def moved(found: Comparison) -> str:
    """Say by how much a metric is higher or lower, for example "throughput is 2.41 % higher"."""
    return _is(wording.metric(found.metric), found.delta_pct)


def _is(name: str, change_pct: float) -> str:
    size = wording.size_percent(abs(change_pct))
    return f"{name} is {size} {'higher' if change_pct > 0 else 'lower'}"


def _interval(found: Comparison) -> str:
    return (
        f"({wording.interval(found.ci_low_pct, found.ci_high_pct)} with {wording.confidence(found.alpha)} confidence, "
        f"{wording.counted(found.blocks, 'block')})"
    )


def _margin(verdict: Verdict) -> str:
    return wording.plain_percent(verdict.rule["primary"]["margin_pct"])


def _not_proved(verdict: Verdict, variant: VariantVerdict, found: Comparison) -> str:
    proof = f"which proves neither a difference nor sameness within the margin of {_margin(verdict)}"
    name = wording.metric(found.metric)
    return f"{name} changed by {wording.percent(found.delta_pct)} {_interval(found)}, {proof}"


def _stalls(verdict: Verdict, variant: VariantVerdict, found: Comparison) -> str:
    total = wording.percent(found.delta_pct)
    median = wording.NOTHING if found.by_median_pct is None else wording.percent(found.by_median_pct)
    both = f"{total} in total, {median} by median step"
    if found.outlier_steps == (0, 0):
        return f"steps are spread unlike in the two arms, none of them an outlier: {both}"
    counts = f", {found.outlier_steps[1]} slow steps against {found.outlier_steps[0]}" if found.outlier_steps else ""
    return f"single slow steps, not all steps, make the difference: {both}{counts}"


def _alone(verdict: Verdict, variant: VariantVerdict, found: Comparison) -> str:
    proved = _proved(variant.measured, variant, found, _margin(verdict))
    return f"The samples alone say '{variant.measured.value}': {proved}"


def _spreads(verdict: Verdict, variant: VariantVerdict, found: Comparison) -> str:
    why = "one arm's blocks scatter far more than the other's, for which no test holds its level"
    return f"{why}. {_alone(verdict, variant, found)}"


def _is_other_work(variant: VariantVerdict) -> bool:
    return variant.cause is Cause.OTHER_WORK


def _other_work_words(variant: VariantVerdict) -> str:
    return f"{variant.other_work}, so like is not compared with like"


def _other_work(verdict: Verdict, variant: VariantVerdict, found: Comparison) -> str:
    return f"{_other_work_words(variant)}. {_alone(verdict, variant, found)}"


def _reruns(verdict: Verdict, variant: VariantVerdict, found: Comparison) -> str:
    why = "blocks had to run again for a reason that an arm may have caused"
    return f"{why}. {_alone(verdict, variant, found)}"


def _uncalibrated(verdict: Verdict, variant: VariantVerdict, found: Comparison) -> str:
    why = verdict.circumstances.admission.refused_because or "the noise of this device is not known"
    return f"{why}. {_alone(verdict, variant, found)}"


_OPEN: dict[Cause, Callable[[Verdict, VariantVerdict, Comparison], str]] = {
    Cause.NOT_PROVED: _not_proved,
    Cause.STALLS: _stalls,
    Cause.SPREADS: _spreads,
    Cause.RERUNS: _reruns,
    Cause.UNCALIBRATED: _uncalibrated,
    Cause.OTHER_WORK: _other_work,
}
"""What is said of an undecided variant, by the cause, where it has all its numbers."""


_SIDES = {
    VerdictWord.BETTER: "; that is more than the margin of {}",
    VerdictWord.WORSE: "; that is more than the margin of {}",
    VerdictWord.SAME: "; that is within the margin of {}",
}


def _exact(found: ExactComparison, word: VerdictWord, margin: str) -> str:
    name = _capital(wording.metric(found.metric))
    if found.problems:
        return f"{name} is not the same at every repeat, so it cannot be compared exactly."
    if found.unrepeated:
        return f"{name} was measured once with seed {found.unrepeated[0]}, and what is compared exactly is repeated."
    blocks = wording.counted(found.blocks, "block")
    if not any(pair.change for pair in found.seeds):
        return f"{name} is the same, bit for bit, over {blocks}."
    shown = [wording.quantities(found.metric, (pair.variant, pair.baseline)) for pair in found.seeds]
    pairs = dict.fromkeys(f"{own} instead of {base}" for own, base in shown)
    first = found.seeds[0].change_pct
    if METRICS[found.metric].better is None:
        change = f"{name} is not bit-identical"
    elif len(pairs) == 1 and first is not None:
        change = _is(name, first)
    else:
        change = f"{name} changes"
    side = "" if METRICS[found.metric].better is None else _SIDES.get(word, "").format(margin)
    return f"{change}: {', '.join(pairs)}, the same at every repeat over {blocks}{side}."


def says_why(variant: VariantVerdict) -> bool:
    """Tell whether the sentence on a variant holds all of the verdict's reason.

    It does where it has numbers to give, and where it says what is missing.
    """
    found = variant.exact
    numbers = variant.primary is not None if found is None else not found.problems
    return numbers or variant.cause is Cause.MISSING


def _same_peak(found: ExactComparison) -> bool:
    return found.metric in PEAK_METRICS and bool(found.seeds) and not any(pair.change for pair in found.seeds)


def broken_attempts(verdict: Verdict) -> Iterator[str]:
    """Say of the attempts that did not count, arm by arm, in which blocks they broke and why."""
    found: dict[tuple[str | None, FailureClass], list[AttemptRecord]] = {}
    for attempt in verdict.circumstances.attempts:
        found.setdefault((attempt.arm, attempt.failure_class), []).append(attempt)
    for (arm, failure), own in found.items():
        blocks = sorted({attempt.block_index for attempt in own})
        who = f"arm {arm}" if arm else "no arm in particular"
        where = f"block{'s' if len(blocks) > 1 else ''} {block_list(blocks)}"
        why = own[0].message.removeprefix(f"arm '{arm}': ")
        yield f"{wording.counted(len(own), 'attempt')} did not count, in {where}: {who}, {failure}: {why}"


def remarks(verdict: Verdict, variant: VariantVerdict) -> tuple[str, ...]:
    """Return what would help, and the verdict's own notes."""
    return (*_help(verdict, variant), *variant.notes)


def _help(verdict: Verdict, variant: VariantVerdict) -> Iterator[str]:
    if variant.cause is Cause.OTHER_WORK:
        yield "To compare it: let a metric decide that counts the work done, such as tokens_per_s, or do equal work."
    if variant.exact is not None and _same_peak(variant.exact):
        yield "Not one byte: what its gates change is not where the peak is. Where it is, the answer may be another."
    model = None if variant.verdict in WITHOUT_STATISTICS else confound(variant)
    if model is not None and variant.cause is not Cause.OTHER_WORK:
        bound = "" if _losses_compared(variant) else " A loss that shall decide too needs a max_delta under require."
        yield f"{_capital(model)}.{bound}"
    command = verdict.circumstances.admission.mended_by
    refused = not verdict.calibrated and variant.cause in (Cause.UNCALIBRATED, Cause.NOT_PROVED)
    if refused and command:
        word = "this word" if variant.cause is Cause.UNCALIBRATED else "a word beyond inconclusive"
        yield f"To have {word} published: {command}."
    if variant.blocks_needed is not None:
        chance = variant.chances.get(variant.blocks_needed)
        likely = "" if chance is None else f" with a chance of {wording.plain_percent(100 * chance)}"
        cost = variant.device_minutes_needed
        minutes = "" if cost is None else f" and take about {wording.counted(round(cost), 'device minute')}"
        blocks = wording.counted(variant.blocks_needed, "block")
        another = "Once the device is admitted, another" if refused else "Another"
        yield f"{another} ablation of {blocks} would answer{likely}{minutes}.{_why_so_many(variant)}"


def _why_so_many(variant: VariantVerdict) -> str:
    if variant.primary is None:
        return ""
    noise = wording.size_percent(variant.primary.sd_pct)
    mended = "a quieter machine or a longer window (workload.steps.timed) needs fewer"
    return f" Blocks differ with an sd of {noise}; {mended}."


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
