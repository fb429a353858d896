"""Tables of the kernels of a profiled step: what a variant ran more, less, more often or longer than the baseline."""

import csv
import io
from collections.abc import Callable, Iterable

from ablate.experiments.analysis.verdicts import KernelChange, KernelUse, StepKernels
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Column, Table, numbers, row, texts
from ablate.experiments.system.logs import visible
from ablate.model.measurements import KernelFacts


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


_FACTS: dict[str, Callable[[KernelFacts], str | None]] = {
    "registers": lambda facts: _amount(facts.registers),
    "threads": lambda facts: _amount(facts.threads),
    "shared memory, KiB": lambda facts: _amount(facts.shared_bytes, 2**10),
    "occupancy": lambda facts: None if facts.occupancy is None else wording.plain_percent(100 * facts.occupancy),
    "TFLOP/s": lambda facts: _amount(facts.flops_per_s, 1e12),
    "GB/s": lambda facts: _amount(facts.bytes_per_s, 1e9),
}
"""Heading of a column -> the text of a kernel's facts, None where it is unknown."""


def launches_table(arm: str, kernels: StepKernels) -> Table:
    """Return the launches and the speeds of a variant's and the baseline's kernels; no rows where nothing is known."""
    rows = [
        (change, [_both(change, read) for read in _FACTS.values()])
        for change in kernels.changes
        if any(use and use.facts for use in (change.baseline, change.variant))
    ]
    shown = [place for place in range(len(_FACTS)) if any(cells[place] != wording.NOTHING for _change, cells in rows)]
    headings = list(_FACTS)
    return Table(
        title=f"Launches of the kernels of {arm} against the baseline",
        columns=(Column("kernel", "code"), *numbers(*(headings[place] for place in shown))),
        rows=tuple(row(visible(change.name), *(cells[place] for place in shown)) for change, cells in rows),
        note="Baseline → variant where they differ. Registers: of a thread; threads and shared memory: of a block. The "
        "occupancy follows from the launch; nobody counted it. TFLOP/s and GB/s: products of 16-bit matrices, beside "
        "their longest kernel. Each matrix and result counts once; what the memory moved is unknown.",
    )


def _both(change: KernelChange, read: Callable[[KernelFacts], str | None]) -> str:
    """Return a fact in the baseline and in the variant, once if it is the same or only one of them has the kernel."""
    uses = [use for use in (change.baseline, change.variant) if use is not None]
    texts = [(None if use.facts is None else read(use.facts)) or wording.NOTHING for use in uses]
    return " → ".join(dict.fromkeys(texts))


def _amount(amount: float | None, unit: float = 1) -> str | None:
    return None if amount is None else wording.number(amount / unit)


def _calls(use: KernelUse | None) -> str:
    return wording.NOTHING if use is None else f"{use.calls:g}"


def _us(use: KernelUse | None) -> str:
    return wording.NOTHING if use is None else f"{use.us:,.1f}"


_HEADINGS = ("kernel", "differs", "calls", "calls_baseline", "us", "us_baseline", "change_us")


def kernels_csv(changes: Iterable[KernelChange]) -> str:
    """Return all kernels of a variant and the baseline as CSV, which MLflow shows as a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = [(change, _facts_of(change)) for change in changes]
    columns = [
        name for name in KernelFacts.model_fields if any(name in facts for _change, both in rows for facts in both)
    ]
    writer.writerow([*_HEADINGS, *(heading for name in columns for heading in (name, f"{name}_baseline"))])
    for change, both in rows:
        uses = (change.variant, change.baseline)
        calls, spent = ([getattr(use, name) if use else "" for use in uses] for name in ("calls", "us"))
        facts = (facts.get(name, "") for name in columns for facts in both)
        writer.writerow([visible(change.name), change.kind, *calls, *spent, round(change.change_us, 3), *facts])
    return text.getvalue()


def _facts_of(change: KernelChange) -> list[dict[str, object]]:
    """Return what is known of a kernel in the variant and in the baseline, sizes as in 128x1x1."""
    uses = (change.variant, change.baseline)
    return [
        {name: "x".join(map(str, value)) if isinstance(value, tuple) else value for name, value in facts.items()}
        for facts in (use.facts.model_dump() if use and use.facts else {} for use in uses)
    ]
