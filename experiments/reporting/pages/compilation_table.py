"""The table of what the compiler said about every arm, on node classes that compile and execute nothing."""

from collections.abc import Callable, Mapping

from experiments.records.compilation_report import CompilationReport, HbmPlan
from experiments.reporting import wording
from experiments.reporting.table import Table, numbers, row, texts
from experiments.reporting.view import AblationView


def _of_plan(read: Callable[[HbmPlan], int]) -> Callable[[CompilationReport], str]:
    return lambda report: wording.NOTHING if report.hbm is None else wording.gib(read(report.hbm))


ROWS: dict[str, Callable[[CompilationReport], str]] = {
    "peak HBM of one chip": _of_plan(lambda plan: plan.peak_bytes),
    "arguments": _of_plan(lambda plan: plan.argument_bytes),
    "temporaries": _of_plan(lambda plan: plan.temp_bytes),
    "program": _of_plan(lambda plan: plan.code_bytes),
    "does not fit": lambda report: _overflow(report),
    "matrix products outside of kernels, TFLOP": lambda report: _tera(report.matmul_flops),
    "the compiler's own count, TFLOP": lambda report: _tera(report.compiler_flops),
    "custom calls": lambda report: str(report.custom_calls),
    "kernels": lambda report: _counts(report.kernels),
    "custom calls, compiled": lambda report: _told(report.compiled_calls),
    "collectives": lambda report: _counts(report.collectives or {}),
    "instructions, lowered": lambda report: f"{report.instructions:,}",
    "topology": lambda report: f"{report.topology}, {wording.counted(report.chips, 'chip')}",
    "libtpu": lambda report: report.versions.get("libtpu", wording.NOTHING),
    "module": lambda report: report.hlo_digest.removeprefix("sha256:")[:12],
}
"""Heading -> how an arm's number is written."""


def compilation_table(view: AblationView) -> Table:
    """Return the compilation of every arm's first trial; without rows where nothing was only compiled."""
    first: dict[str, CompilationReport] = {}
    for receipt in view.receipts:
        if receipt.compilation is not None:
            first.setdefault(receipt.arm, receipt.compilation)
    names = [arm.name for arm in view.plan.arms if arm.name in first]
    rows = tuple(row(heading, *(write(first[name]) for name in names)) for heading, write in ROWS.items())
    return Table(
        title="Compilation",
        columns=(*texts("what the compiler said"), *numbers(*names)),
        rows=rows if names else (),
        note="From the first trial of each arm; nothing was run. Peak: arguments + outputs - aliased + temporaries,"
        " without the program. The compiler's own count takes a loop's body once, and of a kernel what it declares; the"
        " matrix products are counted with every trip, recomputation included.",
    )


def _overflow(report: CompilationReport) -> str:
    if report.overflow is None:
        return wording.NOTHING
    needed, there = (wording.gib(size) for size in (report.overflow.needed_bytes, report.overflow.available_bytes))
    return f"{report.overflow.memory.upper()}: {needed} of {there}"


def _told(count: int | None) -> str:
    return wording.NOTHING if count is None else str(count)


def _tera(flops: float | None) -> str:
    return wording.NOTHING if flops is None else wording.number(flops / 1e12, 4)


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.items() if count) or "none"
