"""The report's first screen: a line for every variant, best first, what it ran at, and what to be careful about."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from experiments.analysis.verdicts import Cause, Comparison, ExactComparison, VariantVerdict, Verdict
from experiments.block_numbers import block_name
from experiments.design.metrics import METRICS, WINDOW_METRICS
from experiments.outcomes import Outcome, VerdictWord
from experiments.records.receipts import Receipt
from experiments.reporting import verdict_cells, wording
from experiments.reporting.sentences import WITHOUT_STATISTICS, missing
from experiments.reporting.table import Cell
from experiments.reporting.verdict_layout import VariantLayout, is_exact, speed_unjudged, words_capped
from experiments.reporting.view import AblationView
from model.measurements import Metric

WORTH_LOAD = 0.1
"""Share of the cores' time by others from which it is told."""
WORTH_DRIFT_PCT = 1.0
"""Change of the baseline over the blocks from which it is told."""

_PROVISIONAL = {
    Cause.UNCALIBRATED: "node not calibrated",
    Cause.SPREADS: "the arms scatter differently",
    Cause.RERUNS: "blocks had to run again",
}
"""Why a word that the samples alone give is not published, in short."""


@dataclass(frozen=True, kw_only=True)
class AnswerLine:
    """One variant on one line."""

    variant: VariantLayout
    word: Cell
    """The published word, in the tone of what the samples say."""
    headline: str
    """For example "slower by 24.60 % (15.10 to 37.40), provisional: node not calibrated"."""
    absolute: str
    """Throughput and peak memory."""


@dataclass(frozen=True, kw_only=True)
class FirstScreen:
    """All that a reader needs first."""

    lines: tuple[AnswerLine, ...]
    baseline: str
    """Throughput and peak memory of the baseline."""
    warnings: tuple[str, ...]


def first_screen(view: AblationView) -> FirstScreen | None:
    """Return the first screen of an ablation that has a verdict."""
    verdict, answer = view.verdict, view.answer
    if verdict is None or answer is None:
        return None
    judged = {variant.arm: variant for variant in verdict.variants}
    lines = tuple(
        AnswerLine(
            variant=layout,
            word=word_of(judged[layout.arm], layout.word),
            headline=headline(verdict, judged[layout.arm]),
            absolute=_absolute(view, verdict, layout.arm),
        )
        for layout in answer.variants
    )
    return FirstScreen(
        lines=lines, baseline=_absolute(view, verdict, verdict.baseline), warnings=tuple(_warnings(view, verdict))
    )


def word_of(variant: VariantVerdict, word: Cell) -> Cell:
    """Return the published word in the tone of what the samples say; of other work they say nothing."""
    if variant.cause is Cause.OTHER_WORK:
        return Cell(text=word.text, sign=word.sign, tone=word.tone)
    tone = verdict_cells.WORDS[variant.measured][1]
    provisional = variant.measured is not variant.verdict
    return Cell(text=word.text, sign=word.sign, tone=tone, note="provisional" if provisional else "")


def _absolute(view: AblationView, verdict: Verdict, arm: str) -> str:
    found = view.arms[arm]
    speed = wording.rate(found)
    if speed and speed_unjudged(verdict):
        speed = f"{speed} (not judged)"
    peak = None if found.peak_allocated_bytes is None else wording.gib(found.peak_allocated_bytes)
    return ", ".join(part for part in (speed, peak) if part)


def headline(verdict: Verdict, variant: VariantVerdict) -> str:
    """Say what happened to a variant, for example "slower by 24.60 % (15.10 to 37.40)", and what confounds it."""
    said = _lacking(variant) if variant.cause is Cause.MISSING else _finding(verdict, variant)
    if variant.cause is Cause.OTHER_WORK:
        return f"{said}, not comparable: {variant.other_work}"
    plain = variant.other_model is None or variant.verdict in WITHOUT_STATISTICS
    return said if plain else f"{said}; another numerical model: {variant.other_model}"


def _lacking(variant: VariantVerdict) -> str:
    numbers = "" if variant.primary is None else f"{_signed(variant.primary)}; "
    return f"open: {numbers}{missing(variant)}"


def _finding(verdict: Verdict, variant: VariantVerdict) -> str:
    if variant.exact is not None:
        return _of_values(variant, variant.exact)
    found = variant.primary
    if found is None:
        return wording.with_minus(variant.reason)
    if variant.cause is Cause.OTHER_WORK:
        return _said(verdict, variant.measured, found)
    if variant.cause in _PROVISIONAL and variant.measured is not VerdictWord.INCONCLUSIVE:
        return f"{_said(verdict, variant.measured, found)}, provisional: {_PROVISIONAL[variant.cause]}"
    if variant.cause is not None and variant.cause is not Cause.NOT_PROVED:
        return f"open, {variant.cause}: {_signed(found)}"
    return _said(verdict, variant.measured, found)


def _said(verdict: Verdict, word: VerdictWord, found: Comparison) -> str:
    if word is VerdictWord.SAME:
        return f"the same within {wording.plain_percent(verdict.rule['primary']['margin_pct'])}: {_signed(found)}"
    if word is VerdictWord.INCONCLUSIVE:
        return f"no difference shown: {_signed(found)}"
    ends = sorted((abs(found.ci_low_pct), abs(found.ci_high_pct)))
    low, high = (wording.size_percent(end).split(wording.SPACE)[0] for end in ends)
    size = wording.size_percent(abs(found.delta_pct))
    return f"{_direction(found.metric, found.delta_pct)} by {size} ({low} to {high})"


def _signed(found: Comparison) -> str:
    return f"{wording.percent(found.delta_pct)} ({wording.interval(found.ci_low_pct, found.ci_high_pct)})"


def _direction(name: str, change_pct: float) -> str:
    """Say which way a metric went, for example "slower" or "more peak reserved memory"."""
    metric = METRICS[name]
    if name in WINDOW_METRICS:
        return "faster" if (change_pct > 0) == (metric.better == "higher") else "slower"
    return f"{'more' if change_pct > 0 else 'less'} {metric.label}"


def _of_values(variant: VariantVerdict, found: ExactComparison) -> str:
    metric: Metric = METRICS[found.metric]
    if found.problems:
        return f"{metric.label} is not exact here: its repeats differ"
    if found.unrepeated:
        return f"{metric.label} was not repeated"
    if not any(pair.change for pair in found.seeds):
        return f"{metric.label} is the same, bit for bit"
    changes = {pair.change_pct for pair in found.seeds}
    if metric.better is None or len(changes) > 1 or None in changes:
        return f"{metric.label} differs: {', '.join(_changes(found))}"
    (change,) = (pct for pct in changes if pct is not None)
    within = ", within the margin" if variant.measured is VerdictWord.SAME else ""
    return f"{_direction(found.metric, change)} by {wording.size_percent(abs(change))}{within}"


def _changes(found: ExactComparison) -> Iterator[str]:
    """Write the changes of the seeds, each once, growing; values where the baseline has 0, of which none is a share."""
    yield from map(wording.percent, sorted({p.change_pct for p in found.seeds if p.change_pct is not None}))
    for value in sorted({pair.variant for pair in found.seeds if pair.change_pct is None}):
        own, base = wording.quantities(found.metric, (value, 0.0))
        yield f"{own} instead of {base}"


def _warnings(view: AblationView, verdict: Verdict) -> Iterator[str]:
    known = verdict.circumstances
    if nodes := wording.caveat(verdict):
        yield nodes
    if refused := words_capped(verdict):
        mended = f"; to change that: {known.admission.mended_by}" if known.admission.mended_by else ""
        yield f"Words are provisional: {refused}{mended}."
    if known.attempts:
        classes = Counter(str(attempt.failure_class) for attempt in known.attempts)
        counts = ", ".join(f"{count} {name}" for name, count in classes.items())
        yield f"{wording.counted(len(known.attempts), 'attempt')} did not count: {counts}."
    if known.family.number > 1 and not is_exact(verdict):
        yield f"This question was asked {known.family.number} times: the level is split over the askings."
    ended = Counter(str(r.outcome) for r in view.receipts if r.outcome is not Outcome.MEASURED)
    if ended:
        counts = ", ".join(f"{count} {name}" for name, count in ended.items())
        yield f"{sum(ended.values())} of {wording.counted(len(view.receipts), 'trial')} did not measure: {counts}."
    yield from _load(view, verdict)
    yield from _drift(view, verdict)


def _load(view: AblationView, verdict: Verdict) -> Iterator[str]:
    """Tell what others took of the cores, and that speeds were not judged where something else decides."""
    loads = [(r.environment.foreign_load or 0.0, r.ids.block_index) for r in view.receipts]
    most, block = max(loads, default=(0.0, 0))
    taken = f"others took up to {wording.plain_percent(100 * most)} of the cores' time ({block_name(block)})"
    if speed_unjudged(verdict):
        said = f"Speeds are not judged: {wording.metric(verdict.rule['primary']['metric'])} decides"
        yield f"{said}, and {taken}." if most >= WORTH_LOAD else f"{said}."
    elif most >= WORTH_LOAD:
        yield f"{taken.capitalize()}."


def _drift(view: AblationView, verdict: Verdict) -> Iterator[str]:
    """Tell a change of the baseline from the first block to the last, by a straight line through one node's blocks."""
    by_node: dict[str, list[Receipt]] = {}
    for receipt in view.whole_blocks.of(verdict.baseline):
        if receipt.outcome is Outcome.MEASURED and receipt.summary:
            by_node.setdefault(receipt.environment.node_name, []).append(receipt)
    node, own = max(by_node.items(), key=lambda entry: len(entry[1]), default=("", []))
    if len(own) < 3:  # a line through two points says nothing
        return
    where = f" on {node}" if len(by_node) > 1 else ""
    order = sorted(own, key=lambda r: r.started_at)
    logs = np.log([r.summary.tokens_per_s for r in order if r.summary])
    slope = float(np.polyfit(np.arange(len(logs)), logs, 1)[0]) * (len(logs) - 1)
    change = 100 * float(np.expm1(slope))
    if abs(change) >= WORTH_DRIFT_PCT:
        moved = f"The baseline moved by {wording.percent(change)} from the first block to the last{where}"
        yield f"{moved}; pairs share it."
