"""What the samples of undecided variants say so far, what is missing, and the command that continues."""

from collections.abc import Iterator, Sequence

from ablate.experiments.analysis.verdicts import OPEN, Cause, Comparison, VariantVerdict, Verdict
from ablate.experiments.design.metrics import OTHER_PROGRAM, PROCESS_TIME, TARGET_METRICS, WINDOW_METRICS
from ablate.experiments.design.power import alpha_of
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.reporting import wording

_MANY, _FEW = 10, 100
"""Times the planned blocks; and a number that may be more than they."""
_BUSY = 0.1
"""Share of the cores' time of others above which no more blocks than were planned are advised."""
_MOST = 3
"""Variants of which the first lines speak; the table has all."""
BY_WORK = "--processor-time"
"""Option of `ablate run --continue`."""
CONTINUED = OPEN | {Cause.MISSING, Cause.UNCALIBRATED}
"""Causes that more blocks remove."""


def outlook(verdict: Verdict, variants: Sequence[VariantVerdict]) -> tuple[str, ...]:
    """Return a line for each of the first undecided variants, and those that say how to continue."""
    undecided = [one for one in variants if one.verdict is VerdictWord.INCONCLUSIVE and one.exact is None]
    shown = [(one, one.primary) for one in undecided if one.primary is not None][:_MOST]
    lines = [f"{one.arm}: {_so_far(one, primary)}; {_lacking(verdict, one)}." for one, primary in shown]
    return (*lines, *_how_to_continue(verdict, undecided))


def to_continue(variants: Sequence[VariantVerdict]) -> list[VariantVerdict]:
    """Return the variants that another ablation may decide."""
    undecided = [one for one in variants if one.verdict is VerdictWord.INCONCLUSIVE and one.exact is None]
    return [one for one in undecided if one.cause in CONTINUED and not _is_hopeless(one)]


def _is_hopeless(variant: VariantVerdict) -> bool:
    return variant.cause in OPEN and variant.blocks_needed is None


def _so_far(variant: VariantVerdict, comparison: Comparison) -> str:
    """Return the estimate, and which differences its interval excludes where the tests hold."""
    name, (low, high) = wording.metric(comparison.metric), (comparison.ci_low_pct, comparison.ci_high_pct)
    size = wording.size_percent(abs(comparison.delta_pct))
    probably = f"{name} is probably {size} {'higher' if low > 0 else 'lower'}"
    estimate = f"{name} may be higher or lower" if low <= 0 <= high else probably
    if variant.cause not in OPEN or comparison.metric in TARGET_METRICS:
        return f"{estimate} ({wording.interval(low, high)})"
    confidence = wording.confidence(comparison.alpha)
    ends = f"below {wording.percent(low)} and above {wording.percent(high)}"
    return f"{estimate}. Differences {ends} are excluded with {confidence} confidence"


def _lacking(verdict: Verdict, variant: VariantVerdict) -> str:
    """Say why there is no verdict."""
    if _is_hopeless(variant):
        return f"not proved, and more blocks would hardly prove it. {_remedy(verdict, variant)}"
    if needs_many(verdict, variant):
        if variant.cause is not Cause.NOT_PROVED:
            margin = wording.plain_percent(verdict.rule["primary"]["margin_pct"])
            return f"a difference is proved, but it is too near to the margin of {margin} to tell which is larger"
        load = _load(verdict, variant)
        why = f", and others took {load:.0%} of the cores' time" if load > _BUSY else ""
        return f"not proved: the noise here is larger than such an effect{why}. {_remedy(verdict, variant)}"
    if variant.cause in OPEN:
        minutes = variant.device_minutes_needed
        cost = "" if minutes is None else f", about {wording.counted(max(1, round(minutes)), 'device minute')},"
        more = variant.blocks_needed or 0
        would = f"not proved: another {wording.counted(more, 'block')}{cost} would probably do"
        if not _in_session(verdict):
            return would
        count = verdict.blocks_planned + more
        again = f"propose the change again with design: {{blocks: {{count: {count}}}}} or more, at the next level"
        return f"{would}, but a proposal is not extended: {again}"
    reasons = {
        Cause.MISSING: wording.with_minus(variant.missing or "blocks are missing"),
        Cause.UNCALIBRATED: verdict.circumstances.admission.refused_because or "the noise of this device is unknown",
    }
    return f"not publishable: {reasons.get(variant.cause or Cause.NOT_PROVED, variant.cause)}"


def _in_session(verdict: Verdict) -> bool:
    return "session" in verdict.rule["comparison"]


def needs_many(verdict: Verdict, variant: VariantVerdict) -> bool:
    """Return whether the noise is so large that whoever asks should change what is measured."""
    planned = verdict.blocks_planned
    most = planned if _load(verdict, variant) > _BUSY else min(_MANY * planned, max(_FEW, 2 * planned))
    return variant.cause in OPEN and (variant.blocks_needed or 0) > most


def _load(verdict: Verdict, variant: VariantVerdict) -> float:
    """Return the share of the cores' time that others took, 0 where no time or work on cores decides."""
    loads = [arm.foreign_load for arm in verdict.arms.values() if arm.foreign_load is not None]
    of_seeds = variant.primary is not None and _is_of_seeds(variant.primary)
    return 0.0 if of_seeds or verdict.node_class != "cpu" else max(loads, default=0.0)


def _is_of_seeds(primary: Comparison) -> bool:
    return primary.better is not None or primary.baseline is not None


def _remedy(verdict: Verdict, variant: VariantVerdict) -> str:
    """Say in one sentence what would show more than many blocks."""
    if variant.primary is not None and _is_of_seeds(variant.primary):
        return "Runs of one arm differ more than the arms do: only longer training or a larger effect shows more"
    if verdict.node_class != "cpu":
        return "Only longer windows (workload.steps.timed) or a node that nothing else uses show more"
    return "Only fewer other programs or longer trials show more"


def may_ask_by_work(verdict: Verdict, variants: Sequence[VariantVerdict]) -> bool:
    """Return whether processor time may decide what the time of a program of the user on cores did not."""
    own = verdict.rule["comparison"].get("other_work") == OTHER_PROGRAM["other_work"]
    timed = verdict.rule["primary"]["metric"] in {PROCESS_TIME, *WINDOW_METRICS}
    return own and timed and verdict.node_class == "cpu" and any(one.cause in OPEN for one in variants)


def _how_to_continue(verdict: Verdict, undecided: Sequence[VariantVerdict]) -> Iterator[str]:
    if verdict.circumstances.family.question_digest is None or _in_session(verdict):
        return
    cheap = [one for one in to_continue(undecided) if not needs_many(verdict, one)]
    command = f"ablate run --continue {verdict.ablation}"
    if cheap:
        yield f"Continue{_price(verdict, cheap)}: {command}"
    if may_ask_by_work(verdict, undecided):
        yield f"By processor time, without waiting (another question, tested at the full level): {command} {BY_WORK}"


def _price(verdict: Verdict, variants: Sequence[VariantVerdict]) -> str:
    """Say that a repeated question is tested more strictly; empty where this one was not spent."""
    spent = [one for one in variants if one.cause is not Cause.MISSING]
    if not spent:
        return ""
    number = max(verdict.circumstances.family.number_of(one.arm) for one in spent)
    now, later = (wording.plain_percent(100 * alpha_of(one)) for one in (number, number + 1))
    return f" with new blocks (a repeated question is tested more strictly, at {later} instead of {now})"
