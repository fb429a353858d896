"""Kernels of the gate table, compiled for sm_90a without a GPU, and their budgets (budgets.json).

    python -m tests.kernels.budgets     # compiles every kernel and writes budgets.json; read the difference

Each case is the reference shape or another one, mostly with one gate flipped, and names the kernels to compile.
budgets.json also holds the digest of all inputs of the compilation. While it is theirs, the stored budgets are what a
compilation would find again, and continuous integration compiles a drawn sample. Kernels compile in processes of their
own, so the caller imports neither torch nor tilelang.
"""

import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

Kernel = tuple[str, str]
"""Case and name of a kernel."""
FILE = Path(__file__).with_suffix(".json")
STORED: dict[str, Any] = json.loads(FILE.read_text())
BUDGETS: dict[str, dict[str, dict[str, int]]] = STORED["kernels"]
"""Case -> kernel -> most registers, bytes of shared memory, barriers and spills (0 if absent)."""
INPUTS: str = STORED["inputs"]
"""Digest of the inputs (`inputs`) from which these kernels were compiled."""
REGISTERS = 8
"""A processor gives registers to a thread by the eight, so budgets are multiples of it, or the limit of 255."""
SMALL = ("local_states", "reduce_heads")
"""Kernels of the baseline that every sample has: another process loads them."""
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
        from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape

        variant = self.variant()
        sizes = {name: value for name, value in vars(self).items() if name != "switches"}
        whole = variant.schedule == "sequential"
        return ScanShape(**sizes, C=variant.chunk_size, L=self.S if whole else variant.superchunk or 256)

    def variant(self) -> Any:
        """Return the switches of the kernels."""
        from ablate.kernels.mamba3_mimo.cuda.shape import Variant

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


def every_kernel() -> list[Kernel]:
    """Return all kernels that have a budget, those with the longest compilation first."""
    kernels = [(case, kernel) for case, of_case in BUDGETS.items() for kernel in of_case]
    return sorted(kernels, key=lambda one: (one[1] != "gradients", *one))


def chosen(digest: str, seed: int) -> list[Kernel]:
    """Return the kernels to compile: a sample while the stored costs are those of these inputs, otherwise all."""
    return sample(seed) if digest == INPUTS else every_kernel()


def sample(seed: int) -> list[Kernel]:
    """Return a drawn kernel, the baseline's one of its name, and two small ones (SMALL), each once."""
    case, kernel = random.Random(seed).choice(every_kernel())  # noqa: S311  # a draw, not a secret
    return list(dict.fromkeys([(case, kernel), *(("baseline", name) for name in (kernel, *SMALL))]))


@contextmanager
def compilers(cache: Path) -> Iterator[ProcessPoolExecutor]:
    """Yield processes for the compilation. `cache` holds compiled kernels."""
    context = multiprocessing.get_context("spawn")
    processes = min(len(os.sched_getaffinity(0)), PROCESSES)
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=(cache,)) as pool:
        yield pool


def inputs(programs: Iterable[str]) -> str:
    """Return the digest of what decides the costs: programs with their options, and versions of the tools."""
    return sha256("\n".join((*tools(), *programs)).encode()).hexdigest()


def programs(pool: ProcessPoolExecutor) -> list[str]:
    """Return the text of every kernel's program with its compiler options, in the order of `every_kernel`."""
    kernels = every_kernel()
    return list(pool.map(program_of, [CASES[case] for case, _ in kernels], [kernel for _, kernel in kernels]))


def tools() -> tuple[str, ...]:
    """Return the versions of TileLang, nvcc and the disassembler, and the digest of the code's reader."""
    from ablate.kernels.mamba3_mimo.cuda.host import attest

    answers = [_version(path) for path in (shutil.which("nvcc"), attest.disassembler())]
    return version("tilelang"), *answers, attest.READER


def _version(program: str | None) -> str:
    if program is None:
        return "absent"
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout


def compile_kernels(pool: ProcessPoolExecutor, kernels: Collection[Kernel]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return case -> kernel -> its attested row, or {"failed": the error}."""
    rows = pool.map(_compiled, [CASES[case] for case, _ in kernels], [kernel for _, kernel in kernels])
    compiled: dict[str, dict[str, dict[str, Any]]] = {case: {} for case, _ in kernels}
    for (case, kernel), row in zip(kernels, rows, strict=True):
        compiled[case][kernel] = row
    return compiled


def _prepare(cache: Path) -> None:
    os.environ["TILELANG_CACHE_DIR"] = str(cache)
    os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
    os.nice(10)  # tests with deadlines run beside
    for stream in (1, 2):  # a compiler that fails prints the whole program
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def program_of(case: Case, kernel: str) -> str:
    """Return the text of a kernel's program with its compiler options."""
    from tests.kernels.freeze_programs import options, text

    shape, variant = case.shape(), case.variant()
    return f"{kernel}: {text(kernel, shape, variant)}{options(kernel, variant)}"


def _compiled(case: Case, kernel: str) -> dict[str, Any]:
    from ablate.kernels.mamba3_mimo.cuda.host import attest, compiled

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


def budget(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the smallest budget that allows a kernel's costs, without spills if there are none."""
    least = costs(row)
    least["registers"] = min(-(-least["registers"] // REGISTERS) * REGISTERS, 255)
    return {unit: cost for unit, cost in least.items() if cost or unit != "spills"}


def written(digest: str, kernels: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """Return the text of budgets.json, with one line per kernel."""
    cases = [
        f"  {json.dumps(case)}: {{\n"
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(of_case[name])}" for name in sorted(of_case))
        + "\n  }"
        for case, of_case in kernels.items()
    ]
    return f'{{\n "inputs": "{digest}",\n "kernels": {{\n' + ",\n".join(cases) + "\n }\n}\n"


def main() -> str | None:
    """Compile every kernel and store its costs; return what failed."""
    with tempfile.TemporaryDirectory() as cache, compilers(Path(cache)) as pool:
        digest, compiled = inputs(programs(pool)), compile_kernels(pool, every_kernel())
    rows = {(case, kernel): row for case, of_case in compiled.items() for kernel, row in of_case.items()}
    if failed := [f"{case}: {kernel}: {row['failed']}" for (case, kernel), row in rows.items() if "failed" in row]:
        return "\n".join(failed)
    least = {case: {kernel: budget(rows[case, kernel]) for kernel in of_case} for case, of_case in BUDGETS.items()}
    FILE.write_text(written(digest, least))
    return None


if __name__ == "__main__":
    sys.exit(main())
