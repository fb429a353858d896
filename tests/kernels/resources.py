"""What the kernels of the gate table cost when compiled for sm_90a: made here without a GPU, kept in resources.json.

Each case is the reference shape or another one with one gate flipped, and names the kernels that the flip changes.
Kernels compile in processes of their own, so the one that asks imports neither torch nor tilelang. A kernel whose
program, compiler options and compilers are those that its row in the table was made from is not compiled again: equal
programs compile to equal code.
"""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("resources.json")
WALKS = ("outputs", "gradients", "local_states", "local_gradients")
PROCESSES = 8
"""Compilers that run at a time at most: each takes up to 1 GB."""
SLOWEST = ("gradients", "outputs", "local_states", "local_gradients")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One scan to compile kernels for: the letters of cuda/host/shape.py, and switches of `Variant`."""

    B: int = 8
    S: int = 8192
    H: int = 16
    G: int = 1
    N: int = 64
    P: int = 64
    R: int = 4
    A: int = 16
    gated: bool = True
    reduced: bool = True
    switches: Mapping[str, Any] = field(default_factory=dict)
    kernels: tuple[str, ...] = WALKS
    """Kernels to compile: those that the switches change; empty for all."""


CASES = {
    "baseline": Case(kernels=()),
    "tma=false": Case(switches={"tma": False}),
    "warp_specialize=true": Case(switches={"warp_specialize": True}, kernels=("gradients",)),
    "aggressive_smem_merge=true": Case(switches={"aggressive_smem_merge": True}, kernels=("outputs", "gradients")),
    "layout_2d=false": Case(switches={"layout_2d": False}),
    "pipeline_stages=0": Case(switches={"pipeline_stages": 0}),
    "pipeline_stages=2": Case(switches={"pipeline_stages": 2}),
    "psiv_cache=true": Case(switches={"psiv_cache": True}, kernels=("outputs", "gradients")),
    "fast_math=false": Case(switches={"fast_math": False}, kernels=("outputs", "gradients")),
    "schedule=sequential": Case(switches={"schedule": "sequential"}, kernels=("outputs", "gradients")),
    "superchunk=128": Case(switches={"superchunk": 128}, kernels=("outputs", "gradients")),
    "chunk_size=8": Case(switches={"chunk_size": 8}, kernels=("outputs", "gradients")),
    "chunk_size=32": Case(switches={"chunk_size": 32}, kernels=("outputs", "gradients")),
    "aggressive_smem_merge=true N128": Case(
        S=2048, H=32, N=128, A=32, switches={"aggressive_smem_merge": True}, kernels=("gradients",)
    ),
    "N128": Case(S=2048, H=32, N=128, A=32, kernels=("outputs", "gradients")),
    "P128": Case(P=128, kernels=("outputs", "gradients")),
    "per_rank_ungated": Case(gated=False, reduced=False, kernels=("outputs", "gradients")),
}
"""The gate table's kernels: the reference shape, then one gate flipped at a time, then other shapes."""


def nvcc_release() -> str | None:
    """Return the CUDA release of the nvcc on PATH, for example "13.0", or None without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else None


def compile_cases(
    cases: Mapping[str, Case], cache: Path, known: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return for each case {"kernels": rows by name}, {"refused": the reason} or {"failed": {kernel: the error}}.

    `cache` is where compiled kernels go. `known` are cases of the table, whose rows stand where a kernel's program is
    that of its row. Processes run in parallel, the slowest kernels first.
    """
    context = multiprocessing.get_context("spawn")
    processes = min(len(os.sched_getaffinity(0)), PROCESSES)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(cache,)) as pool:
        every = pool.submit(_kernel_names).result()
        jobs = [(name, kernel) for name, case in cases.items() for kernel in case.kernels or every]
        jobs.sort(key=lambda job: SLOWEST.index(job[1]) if job[1] in SLOWEST else len(SLOWEST))
        rows = [(known or {}).get(case, {}).get("kernels", {}).get(kernel) for case, kernel in jobs]
        asked = ((cases[case], kernel, row) for (case, kernel), row in zip(jobs, rows, strict=True))
        done = list(pool.map(_compiled, *zip(*asked, strict=True)))
    found: dict[str, dict[str, Any]] = {name: {} for name in cases}
    for (name, kernel), result in zip(jobs, done, strict=True):
        if "refused" in result:
            found[name]["refused"] = result["refused"]
        else:
            found[name].setdefault("failed" if "failed" in result else "kernels", {})[kernel] = next(
                iter(result.values())
            )
    return found


def _prepare(cache: Path) -> None:
    os.environ["TILELANG_CACHE_DIR"] = str(cache)
    os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
    os.nice(10)  # tests with deadlines run beside
    for stream in (1, 2):  # a compiler that fails prints the whole program
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _kernel_names() -> tuple[str, ...]:
    from kernels.mamba3_mimo.cuda.host import compiled

    return tuple(compiled.KERNELS)


def _compiled(case: Case, kernel: str, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return {"row": of one compiled kernel}, {"refused": why its variant is}, or {"failed": the error}."""
    from kernels.mamba3_mimo.cuda.host import attest, compiled
    from kernels.mamba3_mimo.cuda.host.refusals import refusal
    from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

    try:
        variant = Variant(**case.switches)
        shape = ScanShape(
            **{name: getattr(case, name) for name in ("B", "S", "H", "G", "N", "P", "R", "A", "gated", "reduced")},
            C=variant.chunk_size,
            L=case.S if variant.schedule == "sequential" else variant.superchunk or 256,
        )
        reason = refusal(variant, shape)
        if reason is not None:
            return {"refused": reason}
        program = _program_sha256(kernel, shape, variant, attest.READER)
        if known is not None and known.get("program_sha256") == program:
            return {"row": dict(known)}
        (row,) = attest.table({kernel: compiled.kernel(kernel, shape, variant)})
    except Exception as error:  # of any kind that a compiler may raise: told in the test's report
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}
    return {"row": {**row, "program_sha256": program}}


def _program_sha256(kernel: str, shape: Any, variant: Any, reader: str) -> str:
    """Return the digest of a program, its compiler options, the compilers' releases, and of what reads the code."""
    import tilelang

    from tests.kernels.freeze_programs import options, text

    parts = (text(kernel, shape, variant), *options(kernel, variant), tilelang.__version__, str(nvcc_release()), reader)
    return sha256("\n".join(parts).encode()).hexdigest()


@lru_cache(maxsize=1)
def committed() -> dict[str, Any]:
    """Return the committed table."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def table(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `compile_cases` found in the form that is committed."""
    return {
        "nvcc": nvcc_release(),
        "cases": {
            name: {"refused": case["refused"]}
            if "refused" in case
            else {"kernels": {kernel: dict(sorted(row.items())) for kernel, row in sorted(case["kernels"].items())}}
            for name, case in found.items()
        },
    }
