"""Parts of the table. Every timed problem is checked first, and our lane is not timed if its check fails."""

import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelError
from ablate.kernels.mamba3_mimo.cuda.host.lengths import choose_walk, walk_length
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant, padded_angles
from ablate.kernels.scan_switches import ScanFact
from ablate.workers.environment_variables import visible_gpus
from tests.kernels.accuracy import Errors
from tests.kernels.bench import chain as chains
from tests.kernels.bench.cases import BenchCase
from tests.kernels.bench.floors import floors, whole_pass
from tests.kernels.bench.lane_process import LaneProcess
from tests.kernels.bench.report import TOGETHER, AccuracyRow, ChainRow, KernelRow, SpeedRow, Times
from tests.kernels.bench.runs import PASSES, Passes

PROFILER_SUFFIX = "_kernel"
KERNEL_RUNS = 5
"""Runs under the profiler."""


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """The lanes, ours first, and the number of samples."""

    lanes: tuple[LaneProcess, ...]
    rounds: int
    repeats: int
    ceilings: dict[str, float]
    """Bytes and FLOPs per second of this GPU."""

    @property
    def ours(self) -> LaneProcess:
        """The cuda lane."""
        return self.lanes[0]


def say(line: str) -> None:
    """Print progress on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def accuracy(bench: BenchRun, problems: Iterable[BenchCase]) -> Iterator[AccuracyRow]:
    """Yield the errors of every lane on every problem."""
    for problem in problems:
        for lane in bench.lanes:
            say(f"accuracy {problem.name}, {lane.lane}")
            row: dict[str, Any] = {"name": problem.name, "lane": lane.lane}
            try:
                yield AccuracyRow(**row, **lane.ask("errors", problem.case, problem.options(lane.lane)))
            except KernelError as error:
                yield AccuracyRow(**row, refused=str(error))


def speed(bench: BenchRun, problems: Iterable[BenchCase]) -> Iterator[SpeedRow | KernelRow]:
    """Yield per problem the times of every lane, sampled in turn, and of its kernels."""
    for problem in problems:
        jobs = [Job(lane, problem.name, _prepared(lane, problem)) for lane in bench.lanes]
        yield from _sampled(bench, [job for job in jobs if job.row.refused is None])
        yield from (job.row for job in jobs if job.row.refused is not None)
        for job in jobs:
            if job.row.refused is None:
                yield from _kernel_rows(bench, problem, job.row, job.kernels["both"])
        for lane in bench.lanes:
            lane.ask("forget")


def attention(bench: BenchRun, problems: Iterable[BenchCase], backends: Iterable[str]) -> Iterator[SpeedRow]:
    """Yield the times of causal attention with the heads of each problem, and of the scan beside it."""
    for problem in problems:
        jobs = []
        for backend in backends:
            row = SpeedRow(name=problem.name, lane=backend)
            try:
                say(f"attention {problem.name}, {backend}")
                bench.ours.ask("prepare_attention", backend, problem.case)
                jobs.append(Job(bench.ours, backend, row))
            except KernelError as error:
                yield row.model_copy(update={"refused": str(error)})
        scan = _prepared(bench.ours, problem)
        if scan.refused is None:
            jobs.append(Job(bench.ours, problem.name, scan))
        else:
            yield scan
        yield from _sampled(bench, jobs)
        bench.ours.ask("forget")


def chain(bench: BenchRun, problems: Iterable[chains.ChainCase]) -> Iterator[ChainRow]:
    """Yield the errors and times of every variant of each chain of matrix products."""
    for problem in problems:
        rows = {variant: _prepared_chain(bench.ours, problem, variant) for variant in chains.VARIANTS}
        jobs = [Job(bench.ours, variant, row) for variant, row in rows.items() if row.refused is None]
        _sample(bench, jobs, ("forward",), chains.CALLS)
        rows |= {job.name: job.row.model_copy(update={"times": job.times("forward")}) for job in jobs}
        yield from rows.values()
        bench.ours.ask("forget")


def _prepared_chain(lane: LaneProcess, problem: chains.ChainCase, variant: str) -> ChainRow:
    """Prepare and check a variant; the row holds the reason if it cannot be timed."""
    say(f"prepare and check {problem.name}, {variant}")
    row: dict[str, Any] = {"name": problem.name, "variant": variant}
    try:
        largest, norm = lane.ask("prepare_chain", variant, problem)
    except KernelError as error:
        return ChainRow(**row, refused=str(error))
    bad = chains.wrong(largest, norm)
    refused = "the check failed; no speed is measured" if bad else None
    return ChainRow(**row, largest=largest, norm=norm, refused=refused)


def _prepared(lane: LaneProcess, problem: BenchCase) -> SpeedRow:
    """Prepare and check a problem; the row holds the reason if it cannot be timed."""
    row = SpeedRow(name=problem.name, lane=lane.lane)
    say(f"prepare and check {problem.name}, {lane.lane}")
    try:
        ready = lane.ask("prepare", problem.name, problem.case, problem.options(lane.lane))
        judged = lane.ask("check", problem.name)
    except KernelError as error:
        return row.model_copy(update={"refused": str(error)})
    bad = judged["wrong"] if lane.lane == Lane.CUDA else _not_finite(judged["errors"])
    refused = f"the check failed: {', '.join(bad)}; no speed is measured" if bad else None
    return row.model_copy(update={**judged, **ready, "refused": refused})


def _not_finite(errors: Errors) -> list[str]:
    """Return results with NaN, the only fault that prevents the timing of the official kernels."""
    return [name for name, (overall, _) in errors.items() if not math.isfinite(overall)]


@dataclass
class Job:
    """A prepared problem in a lane's process."""

    lane: LaneProcess
    name: str
    row: SpeedRow | ChainRow
    kernels: dict[Passes, dict[str, float]] = field(default_factory=dict)
    """Milliseconds of every kernel."""
    samples: dict[tuple[Passes, str], list[float]] = field(default_factory=dict)
    no_graph: dict[Passes, str | None] = field(default_factory=dict)

    def times(self, passes: Passes) -> Times:
        """Return the times of one or both passes."""
        return Times(
            kernels_ms=sum(self.kernels[passes].values()),
            graph_ms=self.samples.get((passes, "graph"), []),
            eager_ms=self.samples[passes, "eager"],
            no_graph=self.no_graph[passes],
        )


def _sampled(bench: BenchRun, jobs: list[Job]) -> list[SpeedRow]:
    """Sample both passes of the jobs and return their rows with the samples."""
    _sample(bench, jobs, PASSES)
    return [job.row.model_copy(update={passes: job.times(passes) for passes in PASSES}) for job in jobs]


def _sample(bench: BenchRun, jobs: list[Job], kinds: Iterable[Passes], calls: int = 1) -> None:
    """Sample the jobs in turn, round after round; a sample is the mean of `calls`."""
    for job in jobs:
        for passes in kinds:
            job.no_graph[passes] = job.lane.ask("capture", job.name, passes)
            job.samples |= {(passes, "graph"): []} if job.no_graph[passes] is None else {}
            job.samples[passes, "eager"] = []
    for _ in range(bench.rounds):
        for job in jobs:
            for (passes, way), samples in job.samples.items():
                samples += job.lane.ask("sample_ms", job.name, passes, way, bench.repeats, calls)
    for job in jobs:
        for passes in kinds:
            job.kernels[passes] = job.lane.ask("kernels_ms", job.name, passes, max(calls, KERNEL_RUNS))


def _kernel_rows(bench: BenchRun, problem: BenchCase, speed: SpeedRow, times: dict[str, float]) -> list[KernelRow]:
    lane, in_turn = speed.lane, int(speed.facts.get(ScanFact.HEADS_IN_TURN, 1))
    shape = replace(shape_run(problem), in_turn=in_turn)
    least = floors(shape) | {TOGETHER: whole_pass(shape, backward=True)}
    rows = []
    for kernel, ms in {TOGETHER: sum(times.values()), **times}.items():
        name = kernel.removesuffix(PROFILER_SUFFIX)
        floor = least.get(name) if lane == Lane.CUDA else None
        numbers: dict[str, float] = {}
        if floor is not None:
            numbers = {"floor_ms": floor.ms(bench.ceilings), "bytes": floor.bytes, "flops": floor.flops}
        rows.append(KernelRow(name=problem.name, lane=lane, kernel=name[:60], ms=ms, **numbers))
    return rows


def shape_run(problem: BenchCase) -> ScanShape:
    """Return the sizes of our lane's kernels for a problem, with the walk that it chooses and one head in turn."""
    case, default = problem.case, Variant(**problem.options(Lane.CUDA))
    variant = choose_walk(default, rows=case.B * case.H, tokens=case.S, state=case.N * case.P)
    walk = walk_length(variant, case.S)
    return ScanShape(
        B=case.B, S=-(-case.S // walk) * walk, H=case.H, G=case.G, N=case.N, P=case.P, R=case.R, C=variant.chunk_size,
        L=walk, A=padded_angles(int(case.N * case.rope) // 2, case.N),
    )  # fmt: skip


def gpu(query: str) -> str:
    """Return the answer of nvidia-smi to a query about the GPU of this process."""
    first, *_ = visible_gpus() or ("0",)
    command = ["nvidia-smi", f"--id={first}", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
