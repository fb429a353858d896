"""The profiled step of each arm: its time and memory in a table, and over time as a file for a trace viewer.

The file has Chrome's trace format, which https://ui.perfetto.dev and chrome://tracing open.
"""

import json
from collections.abc import Iterator
from typing import Any

from ablate.experiments.analysis.programs import kernels_of
from ablate.experiments.node_classes import NODE_CLASSES
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Table, numbers, row, texts
from ablate.experiments.reporting.view import AblationView
from ablate.model.measurements import StepTrace

MIB = 2**20
TRACE_FILE = "trace.json"
"""Name of the file of an arm."""
_PROCESS = 1


def traces(view: AblationView) -> dict[str, StepTrace]:
    """Return the profiled step over time of each arm that has one, from its first trial with one."""
    of_arm: dict[str, StepTrace] = {}
    for arm in view.plan.arms:
        stored = (receipt.step_trace for receipt in view.whole_blocks.of(arm.name))
        first = next((trace for trace in stored if trace is not None), None)
        if first is not None:
            of_arm[arm.name] = first
    return of_arm


def chrome_trace(name: str, trace: StepTrace) -> str:
    """Return a step in Chrome's trace format: a row for each thread and stream, and the memory as a counter."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(name, trace))}, allow_nan=False)


def _events(name: str, trace: StepTrace) -> Iterator[dict[str, Any]]:
    own = {"pid": _PROCESS}
    yield own | {"ph": "M", "name": "process_name", "args": {"name": name}}
    for place, track in enumerate(trace.tracks):
        yield own | {"ph": "M", "name": "thread_name", "tid": place, "args": {"name": track}}
    for of_name, track_place, start, us in trace.events:
        yield own | {"ph": "X", "name": trace.names[of_name], "tid": track_place, "ts": start, "dur": us}
    for moment, num_bytes in trace.memory:
        yield own | {"ph": "C", "name": "bytes in tensors", "ts": moment, "args": {"above the start": num_bytes}}


def step_table(view: AblationView) -> Table:
    """Return time and memory of each arm's profiled step; no rows without profiled steps."""
    traced = traces(view)
    baseline = view.plan.baseline.name
    spent = {
        arm.name: sum(use.us for use in kernels_of(view.whole_blocks.of(arm.name)).values()) for arm in view.plan.arms
    }
    on_host = NODE_CLASSES[view.plan.node_class].on_host
    what = "operators" if on_host else "kernels"
    return Table(
        title="The profiled step",
        columns=(
            *texts("arm"),
            *numbers(f"time in {what}, ms", "change, ms", "change", "peak of its memory, MiB", "events", "left out"),
        ),
        rows=tuple(
            row(name, *_times(us, spent[baseline] if name != baseline else 0.0), *_trace_cells(traced.get(name)))
            for name, us in spent.items()
            if us
        ),
        note="One step after the measured window, under torch's profiler, which slows it down; no verdict uses it. "
        "Times are means over the blocks. Memory: bytes in tensors above those at the start, in the first block. "
        "Events: those of that step over time, which the trace has; the shortest are left out where there are many.",
    )


def _times(us: float, of_baseline: float) -> tuple[Cell | str, ...]:
    shown = Cell(text=wording.number(us / 1e3, 4), numbers={"profiled_us": us})
    if not of_baseline:
        return shown, wording.NOTHING, wording.NOTHING
    change = us - of_baseline
    return shown, wording.signed(change / 1e3, 3), wording.percent(100 * change / of_baseline)


def _trace_cells(trace: StepTrace | None) -> tuple[str, str, str]:
    if trace is None:
        return wording.NOTHING, wording.NOTHING, wording.NOTHING
    peak = max((num_bytes for _moment, num_bytes in trace.memory), default=0)
    return f"{peak / MIB:,.1f}", f"{len(trace.events):,}", f"{trace.left_out:,}"
