"""The stored parts as one Markdown page, which is also what is printed."""

import math
import statistics
from collections.abc import Iterable

from kernels.backends import Lane
from kernels.mamba3_mimo.accuracy import GLOBAL_LIMIT, ROW_LIMIT, Errors, over_limits
from kernels.mamba3_mimo.bench.report import TOGETHER, AccuracyRow, KernelRow, Machine, SpeedRow, SweepRow, TablePart

SHOWN = ("registers", "shared_bytes", "spill_stores", "instructions", "tma_loads", "cp_async", "wgmma", "mbarrier")
"""Columns of a binary's row that the page has; the JSON has all."""
SMALL = 0.01
"""Share of a lane's time under which its kernels are one line of the page."""


def page(parts: Iterable[TablePart]) -> str:
    """Return the whole page."""
    blocks = ["# Kernels of the Mamba-3 MIMO scan"]
    for part in parts:
        blocks += [f"## {part.part.capitalize()}", _machine(part.machine)]
        blocks += [] if part.complete else ["**This part was ended before it was through.**"]
        blocks += _accuracy(part.accuracy) if part.accuracy else []
        blocks += [_speeds(part.speed, part.kernels)] if part.speed else []
        blocks += [_kernels(part.kernels)] if part.kernels else []
        blocks += _checks(part.speed)
        blocks += _sweep(part.sweep) if part.sweep else []
    return "\n\n".join(blocks) + "\n"


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table with columns of equal width, numbers to the right."""
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
        f"{lane}: " + ", ".join(f"{name} {version}" for name, version in found.items())
        for lane, found in machine.versions.items()
    )
    lines = [
        f"{machine.date}, {machine.device}, driver {machine.driver}, clocks {machine.clocks_before} before and "
        f"{machine.clocks_after} after.",
        f"Versions: {versions}.",
    ]
    return "\n".join(lines + [f"Lane {lane} did not run: {why}." for lane, why in machine.absent.items()])


def _accuracy(rows: list[AccuracyRow]) -> list[str]:
    """One table of the largest errors, one of every output where both lanes ran."""
    summary: list[tuple[object, ...]] = []
    for row in rows:
        if row.refused is not None:
            summary.append((row.name, row.lane, "-", "-", "-", row.refused))
            continue
        over = over_limits(row.errors)
        verdict = "over the limits: " + ", ".join(over) if over else "within the limits"
        summary.append((row.name, row.lane, len(row.errors), _worst(row.errors, 0), _worst(row.errors, 1), verdict))
    headings = ("problem", "lane", "outputs", "worst global error", "worst row error", "verdict")
    limits = f"limits: {GLOBAL_LIMIT} of the largest value, {ROW_LIMIT} of a time row"
    return [f"Errors against the float64 reference; {limits}.", table(headings, summary), *_beside(rows)]


def _worst(errors: Errors, kind: int) -> str:
    """Return the largest error of a kind (0 global, 1 row) and whose it is; NaN is larger than all."""
    name = max(errors, key=lambda name: (math.isnan(errors[name][kind]), errors[name][kind]))
    return f"{errors[name][kind]:.5f} {name}"


def _beside(rows: list[AccuracyRow]) -> list[str]:
    """Return ours beside the official errors, output by output."""
    both = {(row.name, row.lane): row.errors for row in rows if row.errors}
    lines, worse = [], []
    for name, lane in both:
        if lane != Lane.CUDA or (name, str(Lane.PEER)) not in both:
            continue
        for output, (ours, ours_row) in both[name, lane].items():
            official, official_row = both[name, str(Lane.PEER)][output]
            lines.append((name, output, *(f"{x:.5f}" for x in (ours, official, ours_row, official_row))))
            worse += [f"{name} {output}"] if not ours <= official else []
    if not lines:
        return ["No output was measured on both lanes."]
    headings = ("problem", "output", "ours", "official", "ours, row", "official, row")
    count = f"Ours is at least as accurate on {len(lines) - len(worse)} of {len(lines)} outputs"
    return [table(headings, lines), count + (f"; less accurate: {', '.join(worse)}." if worse else ".")]


def _checks(rows: list[SpeedRow]) -> list[str]:
    """One table of the errors of the checks that came before the speeds, where both lanes were checked."""
    checked = [AccuracyRow(name=row.name, lane=row.lane, errors=row.checked) for row in rows if row.checked]
    if {row.lane for row in checked} < {str(Lane.CUDA), str(Lane.PEER)}:
        return []
    return ["Checked before, on one row of at most 8192 tokens each:", *_beside(checked)]


def _speeds(rows: list[SpeedRow], kernels: list[KernelRow]) -> str:
    """Return times by events, with the gaps that the host leaves, and beside them the sums of the kernels."""
    ours = {row.name: row for row in rows if row.lane == Lane.CUDA and row.both_ms}
    together = _whole(kernels)
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if row.refused is not None:
            lines.append((row.name, row.lane, *("-" * 7), row.refused))
            continue
        forward, both = statistics.median(row.forward_ms), statistics.median(row.both_ms)
        sums = together.get((row.name, row.lane)), together.get((row.name, Lane.CUDA))
        ratios: tuple[str, ...] = ("-", "-", "-")
        if row.name in ours and row.lane != Lane.CUDA:
            mine = ours[row.name]
            pairs = ((forward, mine.forward_ms), (both, mine.both_ms))
            ratios = tuple(f"{theirs / statistics.median(times):.2f}" for theirs, times in pairs)
            ratios += (f"{sums[0] / sums[1]:.2f}" if sums[0] and sums[1] else "-",)
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.2f}"
        in_kernels = "-" if sums[0] is None else f"{sums[0]:.3f}"
        spread = f"{min(row.both_ms):.3f} to {max(row.both_ms):.3f} of {len(row.both_ms)}"
        lines.append((row.name, row.lane, f"{forward:.3f}", f"{both:.3f}", in_kernels, peak, *ratios, spread))
    headings = ("forward ms", "both ms", "its kernels ms", "peak GiB", "forward / ours", "both / ours")
    return table(("problem", "lane", *headings, "kernels / ours", "both: range of samples"), lines)


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


def _sweep(rows: list[SweepRow]) -> list[str]:
    times, binaries = [], []
    for row in rows:
        if row.speed.refused is not None:
            times.append((row.change, "-", "-", "-", "-", row.speed.refused))
            continue
        both = statistics.median(row.speed.both_ms)
        change = "-"
        if row.default_ms:
            change = f"{100 * (both / statistics.median(row.default_ms) - 1):+.1f}"
        peak = "-" if row.speed.peak_gib is None else f"{row.speed.peak_gib:.2f}"
        times.append((row.change, f"{statistics.median(row.speed.forward_ms):.3f}", f"{both:.3f}", change, peak, ""))
        binaries += [(row.change, b["name"], *(b.get(key, b.get("why", "-")) for key in SHOWN)) for b in row.binaries]
    return [
        table(("change", "forward ms", "both ms", "against the default, %", "peak GiB", "refused"), times),
        *([table(("change", "kernel", *SHOWN), binaries)] if binaries else []),
    ]
