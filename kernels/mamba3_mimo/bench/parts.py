"""The parts of the table. Every speed comes after a check of the same kernels; a lane that fails it is not timed."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernels.backends import Lane
from kernels.errors import KernelError
from kernels.mamba3_mimo.accuracy import GLOBAL_LIMIT, ROW_LIMIT, Errors
from kernels.mamba3_mimo.bench import cases
from kernels.mamba3_mimo.bench.cases import BenchCase
from kernels.mamba3_mimo.bench.floors import floors, whole_pass
from kernels.mamba3_mimo.bench.lane_process import LaneProcess
from kernels.mamba3_mimo.bench.report import TOGETHER, AccuracyRow, KernelRow, SpeedRow, SweepRow
from kernels.mamba3_mimo.cuda.shape import ScanShape, padded_angles

LIMITS = {Lane.CUDA: (GLOBAL_LIMIT, ROW_LIMIT), Lane.PEER: (0.1, float("inf"))}
"""Lane -> what the check before a speed allows: ours, and the tolerance of the official tests."""
PROFILER_SUFFIX = "_kernel"


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """The lanes that run, ours first, and how many samples are taken."""

    lanes: tuple[LaneProcess, ...]
    rounds: int
    repeats: int

    @property
    def ours(self) -> LaneProcess:
        """The cuda lane."""
        return self.lanes[0]


def say(line: str) -> None:
    """Tell on stderr what is being done."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def accuracy(bench: BenchRun, problems: Iterable[BenchCase]) -> Iterator[AccuracyRow]:
    """Yield the errors of every lane on every problem."""
    for problem in problems:
        for lane in bench.lanes:
            say(f"accuracy {problem.name}, {lane.lane}")
            row: dict[str, Any] = {"name": problem.name, "lane": lane.lane}
            try:
                yield AccuracyRow(**row, errors=lane.ask("open_errors", problem.case, problem.options(lane.lane)))
            except KernelError as error:
                yield AccuracyRow(**row, refused=str(error))


def speed(bench: BenchRun, problems: Iterable[BenchCase]) -> Iterator[SpeedRow | KernelRow]:
    """Yield, problem by problem, times of every lane, taken in turn, and those of its kernels."""
    for problem in problems:
        found = {lane.lane: _prepared(lane, problem) for lane in bench.lanes}
        running = [lane for lane in bench.lanes if found[lane.lane].refused is None]
        yield from _sampled(bench, [(lane, problem.name, found[lane.lane]) for lane in running])
        yield from (row for row in found.values() if row.refused is not None)
        for lane in running:
            yield from _kernel_rows(problem, lane.lane, lane.ask("kernels_ms", problem.name))
        for lane in bench.lanes:
            lane.ask("forget")


def attention(bench: BenchRun, problems: Iterable[BenchCase], backends: Iterable[str]) -> Iterator[SpeedRow]:
    """Yield times of causal attention with the heads of each problem, and of the scan beside it."""
    for problem in problems:
        jobs = []
        for backend in backends:
            row = SpeedRow(name=problem.name, lane=backend)
            try:
                say(f"attention {problem.name}, {backend}")
                bench.ours.ask("prepare_attention", backend, problem.case)
                jobs.append((bench.ours, backend, row))
            except KernelError as error:
                yield row.model_copy(update={"refused": str(error)})
        scan = _prepared(bench.ours, problem)
        if scan.refused is None:
            jobs.append((bench.ours, problem.name, scan))
        else:
            yield scan
        yield from _sampled(bench, jobs)
        bench.ours.ask("forget")


def sweep(bench: BenchRun, problem: BenchCase, changes: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[SweepRow]:
    """Yield times of every change beside the default, and what its binaries show."""
    default = _prepared(bench.ours, problem)
    yield _swept(bench, problem, "default", {}, default)
    for change, options in changes if default.refused is None else ():
        yield _swept(bench, problem, change, options, default)
    bench.ours.ask("forget")


def _swept(bench: BenchRun, problem: BenchCase, change: str, changed: dict[str, Any], default: SpeedRow) -> SweepRow:
    lane, base = bench.ours, problem.options(Lane.CUDA)
    row = default if not changed else _prepared(lane, problem, name=change, changed=changed)
    if row.refused is not None:
        return SweepRow(change=change, speed=row)
    name = change if changed else problem.name
    jobs = [(lane, name, row)] + ([(lane, problem.name, default)] if changed else [])
    timed = _sampled(bench, jobs)
    options = {**base, **changed}
    try:
        binaries = lane.ask("binaries", problem.case, options)
    except KernelError as error:
        binaries = [{"name": "not read", "why": str(error)}]
    if changed:
        lane.ask("forget", name)
    beside = timed[1].both_ms if len(timed) > 1 else []
    return SweepRow(change=change, speed=timed[0], default_ms=beside, binaries=binaries)


def _prepared(
    lane: LaneProcess, problem: BenchCase, *, name: str | None = None, changed: dict[str, Any] | None = None
) -> SpeedRow:
    """Check a smaller problem, then make this one ready; the row says why it is not.

    With `changed` options the whole problem is compared with the default, which was checked before.
    """
    name, options = name or problem.name, {**problem.options(lane.lane), **(changed or {})}
    row = SpeedRow(name=name, lane=lane.lane)
    say(f"check and prepare {name}, {lane.lane}")
    try:
        if changed is None:
            errors: Errors = lane.ask("errors", cases.checks(problem).case, options)
        else:
            errors = lane.ask("errors_beside", problem.case, options, problem.options(lane.lane))
        row = row.model_copy(update={"checked": errors})
        limit, row_limit = LIMITS[lane.lane]
        bad = [key for key, (overall, worst) in errors.items() if not (overall < limit and worst < row_limit)]
        if bad:
            return row.model_copy(update={"refused": f"the check failed: {', '.join(bad)}; no speed is measured"})
        ready = lane.ask("prepare", name, problem.case, options)
    except KernelError as error:
        return row.model_copy(update={"refused": str(error)})
    return row.model_copy(update={"peak_gib": ready["peak_gib"]})


def _sampled(bench: BenchRun, jobs: list[tuple[LaneProcess, str, SpeedRow]]) -> list[SpeedRow]:
    """Sample the jobs in turn, round after round, and return their rows with the samples."""
    samples: list[dict[str, list[float]]] = [{"forward": [], "both": []} for _ in jobs]
    for _ in range(bench.rounds):
        for (lane, name, _row), found in zip(jobs, samples, strict=True):
            for passes, times in found.items():
                times += lane.ask("sample_ms", name, passes, bench.repeats)
    return [
        row.model_copy(update={"forward_ms": found["forward"], "both_ms": found["both"]})
        for (_lane, _name, row), found in zip(jobs, samples, strict=True)
    ]


def _kernel_rows(problem: BenchCase, lane: Lane, times: dict[str, float]) -> list[KernelRow]:
    case = problem.case
    chunk = problem.options(Lane.CUDA)["chunk_size"]
    shape = ScanShape(
        B=case.B,
        S=case.S,
        H=case.H,
        G=case.G,
        N=case.N,
        P=case.P,
        R=case.R,
        C=chunk,
        A=padded_angles(int(case.N * case.rope) // 2, case.N),
    )
    least = floors(shape) | {TOGETHER: whole_pass(shape, backward=True)}
    rows = []
    for kernel, ms in {TOGETHER: sum(times.values()), **times}.items():
        name = kernel.removesuffix(PROFILER_SUFFIX)
        floor = least.get(name) if lane == Lane.CUDA else None
        numbers = {} if floor is None else {"floor_ms": floor.ms, "bytes": floor.bytes, "flops": floor.flops}
        rows.append(KernelRow(name=problem.name, lane=lane, kernel=name[:60], ms=ms, **numbers))
    return rows


def gpu(query: str) -> str:
    """Return what nvidia-smi says to a query, as it says it."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
