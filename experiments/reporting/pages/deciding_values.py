"""The values that decide: of each arm the mean of the deciding metric, its spread, and the change."""

from collections.abc import Iterator

from ablate.experiments.analysis.statistics import mean_of
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipts import read_named
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Table, numbers, row, texts
from ablate.experiments.reporting.verdict_layout import VariantLayout, interval_heading
from ablate.experiments.reporting.view import AblationView


def deciding_values(view: AblationView) -> Table | None:
    """Return the baseline and every variant with the values of the deciding metric; None without any value."""
    verdict, answer = view.verdict, view.answer
    if verdict is None or answer is None:
        return None
    rows = [_row(view, verdict, None), *(_row(view, verdict, variant) for variant in answer.variants)]
    if all(cells[1].text == wording.NOTHING for cells in rows):
        return None
    metric = verdict.rule["primary"]["metric"]
    mean = f"mean, {wording.unit(metric)}" if metric in METRICS else "mean"
    headings = (mean, "smallest to largest", "trials", "change", interval_heading(verdict))
    return Table(
        title=f"The values that decide: {wording.metric(metric)}",
        columns=(*texts("arm"), *numbers(*headings)),
        rows=tuple(rows),
        note="Means over the trials that count. The change is the mean of the pairs of a block.",
    )


def _row(view: AblationView, verdict: Verdict, variant: VariantLayout | None) -> tuple[Cell, ...]:
    arm = verdict.baseline if variant is None else variant.arm
    values = list(_values(view, verdict, arm))
    change = ("", "") if variant is None else (variant.effect, variant.interval)
    if not values:
        return row(arm, wording.NOTHING, wording.NOTHING, "0", *change)
    low, high = wording.number(min(values), 6), wording.number(max(values), 6)
    spread = low if low == high else f"{low} to {high}"
    mean = mean_of(values)
    return row(arm, Cell(text=wording.number(mean, 6), numbers={"mean": mean}), spread, f"{len(values):,}", *change)


def _values(view: AblationView, verdict: Verdict, arm: str) -> Iterator[float]:
    metric = verdict.rule["primary"]["metric"]
    for receipt in view.whole_blocks.of(arm) if arm in view.plan.arm_by_name else ():
        value = read_named(metric, receipt) if receipt.outcome is Outcome.MEASURED else None
        if value is not None:
            yield value
