"""Compilation of kernels into TileLang's disk cache before the measurements, in several processes."""

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelError
from tests.kernels.bench.cases import BenchCase
from tests.kernels.bench.lane_process import lane_process
from tests.kernels.problem import Case


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One run that compiles the kernels of a lane."""

    name: str
    lane: Lane
    case: Case
    options: dict[str, Any]
    function: str
    """Method of work.Worker."""


def needed(part: str, problems: Iterable[BenchCase], lanes: Iterable[Lane]) -> list[CompileJob]:
    """Return the compilations that a part of the table needs, each once, the slow official kernels first."""
    function = "compile_s" if part == "accuracy" else "compile_timed_s"
    jobs = {}
    for problem, lane in product(problems, lanes):
        options, case = problem.options(lane), problem.compiling(lane)
        jobs[f"{lane} {case} {options}"] = CompileJob(
            name=problem.name, lane=lane, case=case, options=options, function=function
        )
    return sorted(jobs.values(), key=lambda job: job.lane != Lane.PEER)


def compile_first(jobs: Iterable[CompileJob], peer_site: Path | None, processes: int) -> None:
    """Run the jobs, `processes` at a time. Refusals and failures are printed and repeat at the measurement."""
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
