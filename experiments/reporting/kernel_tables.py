"""Tables of the kernels of a profiled step: what a variant ran more, less, more often or longer than the baseline."""

import csv
import io
from collections.abc import Iterable

from ablate.experiments.analysis.verdicts import KernelChange, KernelUse, StepKernels
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Column, Table, numbers, row, texts
from ablate.experiments.system.logs import visible


def kernels_table(arm: str, kernels: StepKernels, node_class: str) -> Table:
    """Return the largest changes of a variant's kernels, or operators where the processor computes."""
    what = "Operators" if NODE_CLASSES[node_class].on_host else "Kernels"
    note = "One step after the window, under torch's profiler, which slows it down. The largest change comes first."
    if kernels.same:
        note = f"These arms ran the same {what.lower()}, equally often; sizes may differ. {note}"
    left = kernels.kernels - len(kernels.changes)
    if left > 0:
        note += f" {left:,} more in the receipts."
    if NODE_CLASSES[node_class].on_host:
        note += " On a processor torch reports its operators, without the kernels inside."
    return Table(
        title=f"{what} of {arm} against the baseline",
        columns=(
            Column("operator" if NODE_CLASSES[node_class].on_host else "kernel", "code"),
            *texts("differs"),
            *numbers("calls", "calls, baseline", "us", "us, baseline", "change, us"),
        ),
        rows=tuple(
            row(
                visible(change.name),
                change.kind,
                _calls(change.variant),
                _calls(change.baseline),
                _us(change.variant),
                _us(change.baseline),
                Cell(text=wording.with_minus(f"{change.change_us:+,.1f}"), numbers={"change_us": change.change_us}),
            )
            for change in kernels.changes
        ),
        note=note,
    )


def _calls(use: KernelUse | None) -> str:
    return wording.NOTHING if use is None else f"{use.calls:g}"


def _us(use: KernelUse | None) -> str:
    return wording.NOTHING if use is None else f"{use.us:,.1f}"


_HEADINGS = ("kernel", "differs", "calls", "calls_baseline", "us", "us_baseline", "change_us")


def kernels_csv(changes: Iterable[KernelChange]) -> str:
    """Return all kernels of a variant and the baseline as CSV, which MLflow shows as a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_HEADINGS)
    for change in changes:
        uses = (change.variant, change.baseline)
        calls, spent = ([getattr(use, name) if use else "" for use in uses] for name in ("calls", "us"))
        writer.writerow([visible(change.name), change.kind, *calls, *spent, round(change.change_us, 3)])
    return text.getvalue()
