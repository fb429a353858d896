"""Compile kernels before anything is measured, several processes at a time, into TileLang's disk cache."""

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.backends import Lane
from kernels.errors import KernelError
from kernels.mamba3_mimo.problem import Case
from tests.kernels.bench import cases
from tests.kernels.bench.cases import BenchCase
from tests.kernels.bench.lane_process import lane_process


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One run that makes a lane compile what it needs."""

    name: str
    lane: Lane
    case: Case
    options: dict[str, Any]
    function: str
    """Of work.Worker."""


def needed(part: str, problems: Iterable[BenchCase], lanes: Iterable[Lane]) -> list[CompileJob]:
    """Return what a part of the table needs compiled, everything once, the slow official kernels first."""
    runs: list[tuple[BenchCase, str, dict[str, Any]]] = []
    for problem in problems:
        runs.append((problem, "", {}))
        runs += [(problem, *change) for change in cases.SWEEP] if part == "sweep" else []
    found = {}
    for problem, change, options in runs:
        for lane in lanes:
            accuracy = part == "accuracy"
            every, case = {**problem.options(lane), **options}, problem.compiling(lane, open_sizes=accuracy)
            found[f"{lane} {case} {every}"] = CompileJob(
                name=f"{problem.name} {change}".strip(),
                lane=lane,
                case=case,
                options=every,
                function="compile_s" if accuracy else "compile_timed_s",
            )
    return sorted(found.values(), key=lambda job: job.lane != Lane.PEER)


def compile_first(jobs: Iterable[CompileJob], peer_site: Path | None, processes: int) -> None:
    """Run the jobs, `processes` at a time. What a lane refuses or fails at is said, and comes again when measured."""
    with ThreadPoolExecutor(processes) as pool:
        for line in pool.map(lambda job: _run(job, peer_site), jobs):
            sys.stderr.write(line + "\n")


def _run(job: CompileJob, peer_site: Path | None) -> str:
    try:
        with lane_process(job.lane) as process:
            process.ask("ready", peer_site)
            seconds = process.ask(job.function, job.case, job.options)
    except KernelError as error:
        return f"{job.lane} {job.name}: {error}"
    return f"{job.lane} {job.name}: compiled in {seconds:.0f} s"
