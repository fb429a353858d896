"""The report's first screen: one line per variant, best first, the values that decide, and warnings."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ablate.experiments.analysis.statistics import mean_of
from ablate.experiments.analysis.verdicts import Cause, Comparison, ExactComparison, VariantVerdict, Verdict
from ablate.experiments.block_numbers import block_name, block_number
from ablate.experiments.design.metrics import METRICS, WINDOW_METRICS
from ablate.experiments.outcomes import Outcome, VerdictWord
from ablate.experiments.records.receipts import Receipt, read_named
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.changes import ChangedArm, changed_arms
from ablate.experiments.reporting.sentences import (
    NOT_COMPARED,
    WITHOUT_STATISTICS,
    losses_compared,
    missing,
    origin_problems,
)
from ablate.experiments.reporting.table import Cell, Table, numbers, row, texts
from ablate.experiments.reporting.verdict_layout import (
    REPEATS,
    VariantLayout,
    contradictions,
    control_effect,
    interval_heading,
    is_exact,
    speed_unjudged,
    uncalibrated,
    without_effect,
)
from ablate.experiments.reporting.view import AblationView
from ablate.model.measurements import Metric

LONGEST_CHANGE = 160
"""Characters of a variant's changes beside its verdict."""
WORTH_LOAD = 0.1
"""Share of CPU time taken by other processes from which the page warns."""
MOST_TRIAL_ROWS = 200
"""Blocks whose values the page shows."""
WORTH_DRIFT_PCT = 1.0
"""Drift of the baseline over the blocks from which the page warns."""

_WITHHELD = frozenset(
    {
        *(Cause.UNCALIBRATED, Cause.SPREADS, Cause.NOISE, Cause.RERUNS, Cause.CARRY_OVER, Cause.RARE_EVENTS),
        Cause.CLOCKS,
    }
)
"""Causes beside which the verdict of the samples says something."""


@dataclass(frozen=True, kw_only=True)
class AnswerLine:
    """One variant on one line."""

    variant: VariantLayout
    changed: ChangedArm
    word: Cell
    """The published verdict, with the samples' verdict beside it if that differs."""
    headline: str
    """For example "slower by 24.60 % (15.10 to 37.40), uncalibrated"."""
    absolute: str
    """Throughput and peak memory."""


@dataclass(frozen=True, kw_only=True)
class FirstScreen:
    """The content of the first screen."""

    lines: tuple[AnswerLine, ...]
    baseline: str
    """Throughput and peak memory of the baseline."""
    warnings: tuple[str, ...]


def first_screen(view: AblationView) -> FirstScreen | None:
    """Return the first screen of an ablation; None without a verdict."""
    verdict, answer = view.verdict, view.answer
    if verdict is None or answer is None:
        return None
    judged = {variant.arm: variant for variant in verdict.variants}
    changed = {one.arm: one for one in changed_arms(view.plan.arms)}
    lines = tuple(
        AnswerLine(
            variant=layout,
            changed=changed[layout.arm],
            word=word_cell(judged[layout.arm], layout.word),
            headline=headline(verdict, judged[layout.arm]),
            absolute=_absolute(view, verdict, layout.arm),
        )
        for layout in answer.variants
    )
    return FirstScreen(
        lines=lines, baseline=_absolute(view, verdict, verdict.baseline), warnings=tuple(_warnings(view, verdict))
    )


def word_cell(variant: VariantVerdict, word: Cell) -> Cell:
    """Return the published verdict, with the samples' verdict beside it if that differs, except for other work."""
    if variant.cause is Cause.OTHER_WORK:
        return Cell(text=word.text, sign=word.sign, tone=word.tone)
    where = () if variant.nodes is None else (variant.nodes.in_words(),)
    alone = () if variant.measured is variant.verdict else (f"samples say {variant.measured}",)
    return Cell(text=word.text, sign=word.sign, tone=word.tone, note="; ".join((*where, *alone)))


def _absolute(view: AblationView, verdict: Verdict, arm: str) -> str:
    summary = view.arms[arm]
    speed = wording.rate(summary)
    if speed and speed_unjudged(verdict):
        speed = f"{speed} (not judged)"
    peak = None if summary.peak_allocated_bytes is None else wording.gib(summary.peak_allocated_bytes)
    return ", ".join(part for part in (speed, peak) if part)


def headline(verdict: Verdict, variant: VariantVerdict) -> str:
    """Return a variant's result, for example "slower by 24.60 % (15.10 to 37.40)", and its confounds."""
    result = _result(verdict, variant)
    if variant.cause is Cause.OTHER_WORK:
        return f"{result}, not comparable: {variant.other_work}"
    plain = variant.other_model is None or variant.verdict in WITHOUT_STATISTICS or losses_compared(variant)
    return result if plain else f"{result}; {NOT_COMPARED}"


def _result(verdict: Verdict, variant: VariantVerdict) -> str:
    comparison, cause = variant.primary, variant.cause
    if cause is Cause.MISSING:
        numbers = "" if comparison is None else f"{_signed(comparison)}; "
        return f"not decided: {numbers}{missing(variant)}"
    if variant.exact is not None:
        return _of_values(variant, variant.exact)
    if comparison is None:
        return wording.with_minus(variant.reason)
    measured = _measured(verdict, variant.measured, comparison)
    if cause in (None, Cause.NOT_PROVED, Cause.OTHER_WORK):
        return measured
    if cause in _WITHHELD and variant.measured is not VerdictWord.INCONCLUSIVE:
        return f"{measured}, {cause}"
    return f"not decided, {cause}: {_signed(comparison)}"


def _measured(verdict: Verdict, word: VerdictWord, comparison: Comparison) -> str:
    if word is VerdictWord.SAME:
        return f"the same within {wording.plain_percent(verdict.rule['primary']['margin_pct'])}: {_signed(comparison)}"
    if word is VerdictWord.INCONCLUSIVE:
        return f"no difference shown: {_signed(comparison)}"
    ends = sorted((abs(comparison.ci_low_pct), abs(comparison.ci_high_pct)))
    low, high = (wording.size_percent(end).split(wording.SPACE)[0] for end in ends)
    return f"{_change(comparison.metric, comparison.delta_pct)} ({low} to {high})"


def _signed(comparison: Comparison) -> str:
    interval = wording.interval(comparison.ci_low_pct, comparison.ci_high_pct)
    return f"{wording.percent(comparison.delta_pct)} ({interval})"


def _change(name: str, change_pct: float) -> str:
    """Return a change in words, for example "slower by 2.41 %" or "validation loss 3.07 % higher"."""
    size = wording.size_percent(abs(change_pct))
    if name in WINDOW_METRICS:
        return f"{'faster' if (change_pct > 0) == (METRICS[name].better == 'higher') else 'slower'} by {size}"
    label = METRICS[name].label if name in METRICS else name
    return f"{label} {size} {'higher' if change_pct > 0 else 'lower'}"


def _of_values(variant: VariantVerdict, exact: ExactComparison) -> str:
    metric: Metric = METRICS[exact.metric]
    if exact.problems:
        return f"{metric.label} is not exact here: its repeats differ"
    if exact.unrepeated:
        return f"{metric.label} was not repeated"
    if not any(pair.change for pair in exact.seeds):
        return f"{metric.label} is the same, bit for bit"
    changes = {pair.change_pct for pair in exact.seeds}
    if metric.kind == "loss" or len(changes) > 1 or None in changes:
        return f"{metric.label} differs: {', '.join(_changes(exact))}"
    (change,) = (pct for pct in changes if pct is not None)
    within = ", within the margin" if variant.measured is VerdictWord.SAME else ""
    return f"{_change(exact.metric, change)}{within}"


def _changes(exact: ExactComparison) -> Iterator[str]:
    """Yield the distinct changes of the seeds in rising order; values if the baseline is 0."""
    yield from map(wording.percent, sorted({p.change_pct for p in exact.seeds if p.change_pct is not None}))
    for value in sorted({pair.variant for pair in exact.seeds if pair.change_pct is None}):
        own, base = wording.quantities(exact.metric, (value, 0.0))
        yield f"{own} instead of {base}"


def _warnings(view: AblationView, verdict: Verdict) -> Iterator[str]:
    circumstances = verdict.circumstances
    admission, attempts, family = circumstances.admission, circumstances.attempts, circumstances.family
    yield from () if view.answer is None else view.answer.outlook
    yield from (f"{wording.capitalised(text)}." for text in contradictions(verdict))
    yield from (f"{text}." for text in without_effect(verdict))
    yield from (f"{problem}." for problem in origin_problems(verdict))
    if nodes := wording.caveat(verdict):
        yield nodes
    if refused := uncalibrated(verdict):
        mended = f"; to calibrate: {admission.mended_by}" if admission.mended_by else ""
        yield f"Uncalibrated: {refused}{mended}."
    if attempts:
        counts = _counts(str(attempt.failure_class) for attempt in attempts)
        yield f"{wording.counted(len(attempts), 'broken attempt')}: {counts}."
    if family.number > 1 and not is_exact(verdict) and "session" not in verdict.rule["comparison"]:
        times = wording.counted(len(family.earlier), "earlier ablation")
        yield f"{times} asked this question. Repeats find luck in the end, so this one had to pass a stricter test."
    ends = [str(r.outcome) for r in view.receipts if r.outcome is not Outcome.MEASURED]
    if ends:
        yield f"{len(ends)} of {wording.counted(len(view.receipts), 'trial')} gave no measurement: {_counts(ends)}."
    yield from _load(view, verdict)
    yield from [] if speed_unjudged(verdict) else _drift(view, verdict)


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {wording.failure(name)}" for name, count in Counter(names).items())


def _load(view: AblationView, verdict: Verdict) -> Iterator[str]:
    """Warn about the CPU time of other processes, and about speeds that the rule does not judge."""
    loads = [(r.environment.foreign_load or 0.0, r.ids.block_index) for r in view.receipts]
    most, block = max(loads, default=(0.0, 0))
    taken = f"other processes took up to {wording.plain_percent(100 * most)} of the CPU time ({block_name(block)})"
    if speed_unjudged(verdict):
        unjudged = f"Speeds are not judged: {wording.metric(verdict.rule['primary']['metric'])} decides"
        yield f"{unjudged}, and {taken}." if most >= WORTH_LOAD else f"{unjudged}."
    elif most >= WORTH_LOAD:
        yield f"{wording.capitalised(taken)}."


def _drift(view: AblationView, verdict: Verdict) -> Iterator[str]:
    """Warn about drift of the baseline over the blocks of one node, by a straight line through their rates."""
    by_node: dict[str, list[Receipt]] = {}
    for receipt in view.whole_blocks.of(verdict.baseline):
        if receipt.outcome is Outcome.MEASURED and receipt.summary:
            by_node.setdefault(receipt.environment.node_name, []).append(receipt)
    node, own = max(by_node.items(), key=lambda entry: len(entry[1]), default=("", []))
    if len(own) < 3:  # two points always lie on a line
        return
    where = f" on {node}" if len(by_node) > 1 else ""
    order = sorted(own, key=lambda r: r.started_at)
    logs = np.log([r.summary.tokens_per_s for r in order if r.summary])
    slope = float(np.polyfit(np.arange(len(logs)), logs, 1)[0]) * (len(logs) - 1)
    change = 100 * float(np.expm1(slope))
    if abs(change) >= WORTH_DRIFT_PCT:
        drift = f"The baseline drifted by {wording.percent(change)} from the first block to the last{where}"
        yield f"{drift}; the arms of a block share the drift."


def deciding_values(view: AblationView) -> Table | None:
    """Return the baseline and every variant with the values of the deciding metric; None without any value."""
    verdict, answer = view.verdict, view.answer
    if verdict is None or answer is None:
        return None
    changes = [(variant.arm, variant.effect, variant.interval) for variant in answer.variants]
    if verdict.control is not None:
        changes.append((verdict.control.arm, *control_effect(verdict.control)))
    rows = [_row(view, verdict, verdict.baseline), *(_row(view, verdict, *own) for own in changes)]
    if all(cells[1].text == wording.NOTHING for cells in rows):
        return None
    metric = verdict.rule["primary"]["metric"]
    mean = f"mean, {wording.unit(metric)}" if metric in METRICS and not _is_memory(metric) else "mean"
    proof = "repeats" if is_exact(verdict) else interval_heading(verdict)
    headings = (mean, "smallest to largest", "trials", "change", proof)
    return Table(
        title=f"The values that decide: {wording.metric(metric)}",
        columns=(*texts("arm"), *numbers(*headings)),
        rows=tuple(rows),
        note="Means over the trials that count. The change is the mean of the pairs of a block."
        + ("" if verdict.control is None else f" {verdict.control.arm} {REPEATS}: its change is noise."),
    )


def trial_values(view: AblationView) -> Table | None:
    """Return the deciding metric of every trial, a row for each block; None without any value."""
    if view.verdict is None:
        return None
    metric, arms = view.verdict.rule["primary"]["metric"], [arm.name for arm in view.plan.arms]
    counts = {receipt.digest for arm in arms for receipt in view.whole_blocks.of(arm)}
    values: dict[int, dict[str, Cell]] = {}
    for receipt in view.receipts:
        value = read_named(metric, receipt) if receipt.outcome is Outcome.MEASURED else None
        text = str(receipt.outcome) if value is None else _shown(metric, (value,))[0]
        note = "" if receipt.digest in counts or value is None else "does not count"
        own = {} if value is None else {"value": value}
        values.setdefault(receipt.ids.block_index, {})[receipt.arm] = Cell(text=text, note=note, numbers=own)
    if not any(cell.numbers for own in values.values() for cell in own.values()):
        return None
    blank = Cell(text=wording.NOTHING)
    return Table(
        title=f"Every trial: {_with_unit(metric)}",
        columns=(*texts("block"), *numbers(*arms)),
        rows=tuple(
            row(str(block_number(index)), *(own.get(arm, blank) for arm in arms))
            for index, own in sorted(values.items())[:MOST_TRIAL_ROWS]
        ),
        note=f"The first {MOST_TRIAL_ROWS} of {len(values):,} blocks." if len(values) > MOST_TRIAL_ROWS else "",
    )


def _with_unit(metric: str) -> str:
    label = wording.metric(metric)
    return f"{label}, {wording.unit(metric)}" if metric in METRICS and not _is_memory(metric) else label


def _row(view: AblationView, verdict: Verdict, arm: str, *change: Cell) -> tuple[Cell, ...]:
    values = list(_values(view, verdict, arm))
    cells = change or ("", "")
    if not values:
        return row(arm, wording.NOTHING, wording.NOTHING, "0", *cells)
    mean = mean_of(values)
    low, shown, high = _shown(verdict.rule["primary"]["metric"], (min(values), mean, max(values)))
    spread = low if low == high else f"{low} to {high}"
    return row(arm, Cell(text=shown, numbers={"mean": mean}), spread, f"{len(values):,}", *cells)


def _is_memory(metric: str) -> bool:
    return metric in METRICS and METRICS[metric].unit == "GiB"


def _shown(metric: str, values: Sequence[float]) -> list[str]:
    return wording.quantities(metric, values) if _is_memory(metric) else [wording.number(one, 6) for one in values]


def _values(view: AblationView, verdict: Verdict, arm: str) -> Iterator[float]:
    metric = verdict.rule["primary"]["metric"]
    for receipt in view.whole_blocks.of(arm) if arm in view.plan.arm_by_name else ():
        value = read_named(metric, receipt) if receipt.outcome is Outcome.MEASURED else None
        if value is not None:
            yield value
