"""Kernels of the gate table, compiled for sm_90a without a GPU, and their budgets (budgets.json).

Each case is the reference shape or another one, mostly with one gate flipped, and names the kernels to compile. Kernels
compile in processes of their own, so the caller imports neither torch nor tilelang. TileLang's cache on disk keeps
them: an unchanged kernel is compiled once per machine.
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
from pathlib import Path
from typing import Any

BUDGETS: dict[str, dict[str, dict[str, int]]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Case -> kernel -> most registers, bytes of shared memory, barriers and spills (0 if absent)."""
PROCESSES = 8
"""Most compilers at a time. Each needs up to 1 GB."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One scan: the letters of cuda/shape.py, and switches of `Variant`. `BUDGETS` names its kernels."""

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

    def shape(self) -> Any:
        """Return the sizes of the kernels."""
        from kernels.mamba3_mimo.cuda.shape import ScanShape

        variant = self.variant()
        sizes = {name: value for name, value in vars(self).items() if name != "switches"}
        whole = variant.schedule == "sequential"
        return ScanShape(**sizes, C=variant.chunk_size, L=self.S if whole else variant.superchunk or 256)

    def variant(self) -> Any:
        """Return the switches of the kernels."""
        from kernels.mamba3_mimo.cuda.shape import Variant

        return Variant(**self.switches)


CASES = {
    "baseline": Case(),
    "tma=false": Case(switches={"tma": False}),
    "warp_specialize=true": Case(switches={"warp_specialize": True}),
    "aggressive_smem_merge=true": Case(switches={"aggressive_smem_merge": True}),
    "layout_2d=false": Case(switches={"layout_2d": False}),
    "pipeline_stages=0": Case(switches={"pipeline_stages": 0}),
    "pipeline_stages=2": Case(switches={"pipeline_stages": 2}),
    "psiv_cache=true": Case(switches={"psiv_cache": True}),
    "fast_math=false": Case(switches={"fast_math": False}),
    "schedule=sequential": Case(switches={"schedule": "sequential"}),
    "superchunk=128": Case(switches={"superchunk": 128}),
    "chunk_size=8": Case(switches={"chunk_size": 8}),
    "chunk_size=32": Case(switches={"chunk_size": 32}),
    "N128": Case(S=2048, H=32, N=128, A=32),
    "P128": Case(P=128),
    "per_rank_ungated": Case(gated=False, reduced=False),
}
"""The reference shape, then one flipped gate per case, then other shapes."""


def nvcc_release() -> str | None:
    """Return the CUDA release of the nvcc on PATH, such as "13.0", or None without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", text)
    return release[1] if release else None


def compile_kernels(cache: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return case -> kernel -> its attested row, or {"failed": the error}. `cache` holds compiled kernels."""
    context = multiprocessing.get_context("spawn")
    processes = min(len(os.sched_getaffinity(0)), PROCESSES)
    jobs = sorted((kernel != "gradients", case, kernel) for case, kernels in BUDGETS.items() for kernel in kernels)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(cache,)) as pool:
        rows = list(pool.map(_compiled, [CASES[case] for _, case, _ in jobs], [kernel for _, _, kernel in jobs]))
    compiled: dict[str, dict[str, dict[str, Any]]] = {case: {} for case in BUDGETS}
    for (_, case, kernel), row in zip(jobs, rows, strict=True):
        compiled[case][kernel] = row
    return compiled


def _prepare(cache: Path) -> None:
    os.environ["TILELANG_CACHE_DIR"] = str(cache)
    os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
    os.nice(10)  # tests with deadlines run beside
    for stream in (1, 2):  # a compiler that fails prints the whole program
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _compiled(case: Case, kernel: str) -> dict[str, Any]:
    from kernels.mamba3_mimo.cuda.host import attest, compiled

    try:
        (row,) = attest.table({kernel: compiled.kernel(kernel, case.shape(), case.variant())})
    except Exception as error:  # of any kind that a compiler may raise, shown in the test's report
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}
    return dict(row)


def costs(row: Mapping[str, Any]) -> dict[str, int]:
    """Return a kernel's costs under the names of its budget."""
    spills = row["spill_loads"] + row["spill_stores"]
    return {
        "registers": row["registers"],
        "shared_bytes": row["shared_bytes"],
        "barriers": row["barriers"],
        "spills": spills,
    }


def excess(name: str, row: Mapping[str, Any], budget: Mapping[str, int]) -> list[str]:
    """Return a sentence for every cost above its budget."""
    return [
        f"{name} needs {cost} {unit}, budget {budget.get(unit, 0)}"
        for unit, cost in costs(row).items()
        if cost > budget.get(unit, 0)
    ]
