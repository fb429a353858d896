"""What the samples of undecided variants say so far, what is missing, and the command that continues."""

from collections.abc import Iterator, Sequence

from ablate.experiments.analysis.verdicts import OPEN, Cause, Comparison, VariantVerdict, Verdict
from ablate.experiments.design.metrics import CPU_STEP, OTHER_PROGRAM, PROCESS_METRICS
from ablate.experiments.outcomes import VerdictWord
from ablate.experiments.reporting import wording

_MANY, _FEW = 10, 100
"""Times the planned blocks; and a number that may be more than they."""
_BUSY = 0.1
"""Share of the cores' time of others above which no more blocks than were planned are advised."""
_WIDE = 2.0
"""Factor from which a widened interval is named."""
_MOST = 3
"""Variants of which the first lines speak; the table has all."""
CONTINUED = OPEN | {Cause.MISSING, Cause.UNCALIBRATED}
"""Causes that more blocks remove."""


def outlook(verdict: Verdict, variants: Sequence[VariantVerdict]) -> tuple[str, ...]:
    """Return a line for each of the first undecided variants, and one that says how to continue."""
    undecided = [one for one in variants if one.verdict is VerdictWord.INCONCLUSIVE and one.exact is None]
    shown = [(one, one.primary) for one in undecided if one.primary is not None][:_MOST]
    lines = [f"{one.arm}: {_so_far(primary)}; {_lacking(verdict, one)}." for one, primary in shown]
    return (*lines, *_how_to_continue(verdict, undecided))


def to_continue(variants: Sequence[VariantVerdict]) -> list[VariantVerdict]:
    """Return the variants that another ablation may decide."""
    undecided = [one for one in variants if one.verdict is VerdictWord.INCONCLUSIVE and one.exact is None]
    return [one for one in undecided if one.cause in CONTINUED and not _is_hopeless(one)]


def _is_hopeless(variant: VariantVerdict) -> bool:
    return variant.cause in OPEN and variant.blocks_needed is None


def _so_far(comparison: Comparison) -> str:
    """Return the estimate with its interval, for example "throughput is probably 33.00 % lower (24.00 to 41.00 %)"."""
    name, ends = wording.metric(comparison.metric), (comparison.ci_low_pct, comparison.ci_high_pct)
    if ends[0] <= 0 <= ends[1]:
        wide = f"{comparison.widened:.1f} times as wide because neighbouring blocks may be correlated"
        why = f", {wide}" if comparison.widened >= _WIDE else ""
        return f"{name} may be higher or lower ({wording.interval(*ends)}{why})"
    low, high = sorted(map(abs, ends))
    size, interval = wording.size_percent(abs(comparison.delta_pct)), f"{low:,.2f} to {wording.size_percent(high)}"
    return f"{name} is probably {size} {'higher' if ends[0] > 0 else 'lower'} ({interval})"


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
    """Say in one sentence what makes an answer cheaper than many blocks."""
    primary = variant.primary
    if primary is not None and _is_of_seeds(primary):
        return "Seeds differ more than the arms do: train longer, or look for a larger effect"
    if verdict.node_class != "cpu":
        return "Measure longer windows (workload.steps.timed), or on a node that nothing else uses"
    ways = []
    if verdict.rule["comparison"].get("other_work") == OTHER_PROGRAM["other_work"] and primary is not None:
        if primary.metric == "cpu_s":
            ways.append("compare the processor time of marked steps (metric cpu_step_s)")
        elif primary.metric != CPU_STEP:
            ways.append("compare processor time (metric cpu_step_s, or cpu_s of a program without marks)")
    if verdict.rule["estimator"].keys().isdisjoint(("slices", "turns")):
        whole = primary is not None and primary.metric in PROCESS_METRICS
        key = "workload.turns, or workload.steps.slice where steps are marked" if whole else "workload.steps.slice"
        ways.append(f"let the trials take turns ({key})")
    return f"Close other programs, or {' and '.join(ways) or 'measure more steps (workload.steps.timed)'}"


def _how_to_continue(verdict: Verdict, undecided: Sequence[VariantVerdict]) -> Iterator[str]:
    asked_here = verdict.circumstances.family.question_digest is not None
    cheap = [one for one in to_continue(undecided) if not needs_many(verdict, one)]
    if asked_here and not _in_session(verdict) and cheap:
        yield f"Continue: ablate run --continue {verdict.ablation}"
