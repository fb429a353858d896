"""Markdown page of the stored parts."""

import math
from collections.abc import Iterable, Mapping

from ablate.kernels.backends import Lane
from tests.kernels.accuracy import Errors
from tests.kernels.bench import chain
from tests.kernels.bench.report import (
    TOGETHER,
    WAYS,
    AccuracyRow,
    ChainRow,
    KernelRow,
    Machine,
    SpeedRow,
    TablePart,
    Times,
)

LEGEND = (
    "kernels: sum of the GPU kernels by the profiler; graph: replay of a CUDA graph; eager: calls by events; medians. "
    "least: their shortest time over our longest; most: their longest over our shortest."
)
NOISE = ("whole / noise", "row / noise")
CRITERIA = (
    "Errors against the float64 reference, as shares of the largest value and of a time row. Our limit is 8 times the "
    "noise of rounding the operands to bfloat16 for a whole result, and 32 times for a row "
    "(docs/kernels-correctness.md). The official lane's limit is that of its own tests, a tenth of the largest value."
)
TIMED = "Every timed function is checked. Above the limit our lane is not timed; the official lane is, with a remark. "
CHAIN = (
    "Y = ((A @ B) @ C) @ D in bfloat16. Sums are float32, and every product is rounded to bfloat16. The first column "
    "has the sizes of A and Y; B, C and D are square. An article about CuTe DSL reports about 36 us for one launch, "
    "64 us for three, and 36 us for torch.bmm on an H200. It does not name its sizes, so these are ours. All calls "
    "have the same inputs, so the L2 cache may keep them."
)
CHAIN_LIMITS = (
    f"A time is the mean of {chain.CALLS} chains. Every variant is checked against the chain in float64 with the same "
    f"roundings. It is timed only if the largest error is below {chain.LARGEST:.4f} of the largest value and the norm "
    f"of the error below {chain.NORM} of the norm of Y. Ratios compare with torch.bmm."
)
SMALL = 0.01
"""Kernels below this share of a lane's time share one line of the page."""


def page(parts: Iterable[TablePart]) -> str:
    """Return the whole page."""
    blocks = ["# Kernels of the Mamba-3 MIMO scan"]
    for part in parts:
        blocks += [f"## {part.part.capitalize()}", _machine(part.machine)]
        blocks += [] if part.complete else ["**This part was interrupted.**"]
        blocks += _accuracy(part.accuracy) if part.accuracy else []
        blocks += _speeds(part.speed) if part.speed else []
        blocks += [_kernels(part.kernels)] if part.kernels else []
        blocks += _checks(part.speed)
        blocks += [CHAIN, CHAIN_LIMITS, _chains(part.chain)] if part.chain else []
    return "\n\n".join(blocks) + "\n"


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table with aligned columns, numbers on the right."""
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = [all(row[i][:1].isdigit() or row[i] in ("", "-") for row in cells[1:]) for i in range(len(widths))]
    lines = [
        "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _machine(machine: Machine) -> str:
    versions = "; ".join(
        f"{lane}: " + ", ".join(f"{name} {version}" for name, version in packages.items())
        for lane, packages in machine.versions.items()
    )
    lines = [
        f"{machine.date}, {machine.device}, driver {machine.driver}, clocks {machine.clocks_before} before and "
        f"{machine.clocks_after} after.",
        f"Versions: {versions}.",
    ]
    if machine.ceilings:
        moved, done = machine.ceilings["bytes_per_s"] / 1e12, machine.ceilings["flops_per_s"] / 1e12
        lines.append(f"Ceilings for the floors, measured here: a copy {moved:.2f} TB/s, a product {done:.0f} TFLOP/s.")
    return "\n".join(lines + [f"Lane {lane} did not run: {why}." for lane, why in machine.absent.items()])


def _accuracy(rows: list[AccuracyRow]) -> list[str]:
    """Return a table of the largest errors, and one of every output that both lanes computed."""
    headings = ("problem", "lane", "outputs", "worst global error", "worst row error", *NOISE, "verdict")
    return [CRITERIA, table(headings, [_judged(row) for row in rows]), *_beside(rows)]


def _judged(row: AccuracyRow | SpeedRow) -> tuple[object, ...]:
    if not row.errors:
        return (row.name, row.lane, *("-" * 5), row.refused or "-")
    noise = [_largest({name: share[kind] for name, share in row.shares.items()}, 1) for kind in (0, 1)]
    verdict = "over: " + ", ".join(row.wrong) if row.wrong else "within"
    return (row.name, row.lane, len(row.errors), _worst(row.errors, 0), _worst(row.errors, 1), *noise, verdict)


def _worst(errors: Errors, kind: int) -> str:
    """Return the largest error of a kind (0 global, 1 row) and its output."""
    return _largest({name: error[kind] for name, error in errors.items()}, 5)


def _largest(numbers: Mapping[str, float], digits: int) -> str:
    """Return the largest number and its name. NaN is larger than all."""
    if not numbers:
        return "-"
    name = max(numbers, key=lambda name: (math.isnan(numbers[name]), numbers[name]))
    return f"{numbers[name]:.{digits}f} {name}"


def _beside(rows: list[AccuracyRow]) -> list[str]:
    """Return our errors beside the official ones, per output."""
    both = {(row.name, row.lane): row.errors for row in rows if row.errors}
    lines, worse = [], []
    for name, lane in both:
        if lane != Lane.CUDA or (name, str(Lane.PEER)) not in both:
            continue
        for output, (ours, ours_row) in both[name, lane].items():
            if output not in both[name, str(Lane.PEER)]:  # the official function is timed without a final state
                continue
            official, official_row = both[name, str(Lane.PEER)][output]
            lines.append((name, output, *(f"{x:.5f}" for x in (ours, official, ours_row, official_row))))
            worse += [f"{name} {output}"] if not ours <= official else []
    if not lines:
        return ["No output was measured on both lanes."]
    headings = ("problem", "output", "ours", "official", "ours, row", "official, row")
    count = f"Ours is at least as accurate on {len(lines) - len(worse)} of {len(lines)} outputs"
    return [table(headings, lines), count + (f"; less accurate: {', '.join(worse)}." if worse else ".")]


def _checks(rows: list[SpeedRow]) -> list[str]:
    """Return the errors of the timed functions, with a comparison if both lanes ran."""
    checked = [AccuracyRow(**row.model_dump(include=set(AccuracyRow.model_fields))) for row in rows if row.errors]
    headings = ("problem", "lane", "results", "worst global error", "worst row error", *NOISE, "verdict")
    blocks = [TIMED + CRITERIA, table(headings, [_judged(row) for row in checked])] if checked else []
    if {row.lane for row in checked} < {str(Lane.CUDA), str(Lane.PEER)}:
        return blocks
    return [*blocks, *_beside(checked)]


def ratios(theirs: Times, ours: Times) -> tuple[dict[str, float], float, float]:
    """Return how many times longer theirs take, per kind of time, and the least and the largest ratio across kinds.

    The least compares their shortest time with our longest, the largest their longest with our shortest.
    """
    their, our = theirs.medians(), ours.medians()
    each = {way: their[way] / our[way] for way in WAYS if way in their and way in our}
    return each, min(their.values()) / max(our.values()), max(their.values()) / min(our.values())


def _speeds(rows: list[SpeedRow]) -> list[str]:
    """Return the times of every kind, and their ratios to ours."""
    ours = {row.name: row for row in rows if row.lane == Lane.CUDA and row.refused is None}
    lines: list[tuple[str, ...]] = []
    weakest: list[tuple[float, str]] = []
    notes: list[str] = []
    for row in rows:
        if row.refused is not None:
            lines.append((row.name, "-", row.lane, *("-" * 9), row.refused))
            continue
        for passes, times, our_times in _both_passes(row, ours.get(row.name)):
            compared = ["-"] * 5
            if our_times is not None and row.lane != Lane.CUDA:
                each, least, most = ratios(times, our_times)
                compared = [_number(each.get(way), 2) for way in WAYS] + [_number(least, 2), _number(most, 2)]
                weakest.append((least, f"{row.name}, {passes}, {row.lane}"))
            peak = "-" if times is row.forward else _number(row.peak_gib, 2)
            spread = f"{min(times.eager_ms):.3f} to {max(times.eager_ms):.3f} of {len(times.eager_ms)}"
            shown = (_number(times.medians().get(way), 3) for way in WAYS)
            lines.append((row.name, passes, row.lane, *shown, *compared, peak, spread))
            notes += [f"No graph of {row.name}, {passes}, {row.lane}: {times.no_graph}."] if times.no_graph else []
    headings = ("problem", "passes", "lane", *(f"{way} ms" for way in WAYS), *(f"{way} / ours" for way in WAYS))
    if weakest:
        notes.insert(0, f"{LEGEND} The weakest ratio here is {min(weakest)[0]:.2f} ({min(weakest)[1]}).")
    return [table((*headings, "least", "most", "peak GiB", "eager: range of samples"), lines), *notes]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _both_passes(row: SpeedRow, ours: SpeedRow | None) -> list[tuple[str, Times, Times | None]]:
    """Return (label, times, times of ours) of the forward pass and of both passes."""
    our_passes = (None, None) if ours is None else (ours.forward, ours.both)
    return [("forward", row.forward, our_passes[0]), ("forward+backward", row.both, our_passes[1])]


def _whole(rows: list[KernelRow]) -> dict[tuple[str, str], float]:
    """Return (problem, lane) -> milliseconds of all its kernels."""
    return {(row.name, row.lane): row.ms for row in rows if row.kernel == TOGETHER}


def _kernels(rows: list[KernelRow]) -> str:
    whole = _whole(rows)
    lines = []
    small: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.ms < SMALL * whole.get((row.name, row.lane), 0):
            small.setdefault((row.name, row.lane), []).append(row.ms)
            continue
        if row.floor_ms is None or row.bytes is None or row.flops is None:
            lines.append((row.name, row.lane, row.kernel, f"{row.ms:.3f}", "-", "-", "-", "-"))
            continue
        share = f"{100 * row.floor_ms / row.ms:.0f}"
        moved, done = f"{row.bytes / 1e9:.3f}", f"{row.flops / 1e9:.1f}"
        lines.append((row.name, row.lane, row.kernel, f"{row.ms:.3f}", moved, done, f"{row.floor_ms:.3f}", share))
    lines += [
        (name, lane, f"{len(times)} more, each under {SMALL:.0%}", f"{sum(times):.3f}", "-", "-", "-", "-")
        for (name, lane), times in small.items()
    ]
    headings = ("problem", "lane", "kernel", "ms", "GB", "GFLOP", "floor ms", "floor / time, %")
    return table(headings, lines)


def _chains(rows: list[ChainRow]) -> str:
    """Return the errors and times of the chains, with the ratios to torch.bmm."""
    reference = {row.name: row.times.medians() for row in rows if row.variant == chain.BMM}
    lines = []
    for row in rows:
        times, of_bmm = row.times.medians(), reference.get(row.name, {})
        micro = (_number(1e3 * times[way], 1) if way in times else "-" for way in WAYS)
        shares = (_number(times[way] / of_bmm[way], 2) if way in times and way in of_bmm else "-" for way in WAYS)
        errors = ("-" if error is None else f"{error:.5f}" for error in (row.largest, row.norm))
        lines.append((row.name, row.variant, *errors, *micro, *shares, row.refused or row.times.no_graph or "-"))
    headings = (*(f"{way} us" for way in WAYS), *(f"{way} / bmm" for way in WAYS))
    return table(("chain", "variant", "largest error", "norm of error", *headings, "remark"), lines)
