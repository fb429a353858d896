"""Which of the possible kernels to run: the gates of the CUDA lane, and why a value is refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module

from kernels.mamba3_mimo.cuda.shape import ScanShape

SCHEDULES = ("chunk_parallel", "sequential")
RANKS, STATE_SIZES, HEAD_WIDTHS, CHUNK_ROWS = (1, 2, 4, 8), (16, 32, 64, 128, 256), (32, 64, 128), (32, 64, 128)
CHUNK_SIZES = (8, 16, 32, 64)
KERNEL_FILES = ("backward", "backward_walk_split")
"""Files of this folder with refusals(variant, shape): what their kernels cannot do."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Switches of the generated kernels. None changes the mathematics."""

    tma: bool = True
    """Load tiles with the bulk tensor copy engine; off: cp.async."""
    warp_specialize: bool = False
    """Give the warp groups of the backward walk different roles."""
    aggressive_smem_merge: bool = False
    """Let the compiler overlap shared buffers whose lifetimes do not meet."""
    layout_2d: bool = True
    """Stage q and k in shared memory as swizzled [R * C, N] tiles; off: plain [R, C, N] ones."""
    psiv_cache: bool = False
    """Save PsiV in the forward pass and load it in the backward pass."""
    save_states: bool = True
    """Keep the bf16 state of every chunk from the forward pass (2 * N * P bytes each) instead of recomputing it."""
    fast_math: bool = True
    """Use the hardware's approximate exp2 and tanh."""
    schedule: str = "chunk_parallel"
    """`chunk_parallel`: a block per super-chunk, head and row; `sequential`: one per head and row walks all chunks."""
    chunk_size: int = 16
    """Tokens per chunk."""
    superchunk: int = 256
    """Tokens per super-chunk; the sequential schedule has none."""
    pipeline_stages: int = 1
    """Chunks whose tiles are in flight ahead of the arithmetic; 0 loads synchronously."""


@lru_cache(maxsize=256)
def refusal(variant: Variant, shape: ScanShape) -> str | None:
    """Return why `variant` cannot run `shape`, or None when it can."""
    return next((reason for refused, reason in _all_refusals(variant, shape) if refused), None)


def _all_refusals(variant: Variant, shape: ScanShape) -> Iterator[tuple[bool, str]]:
    yield from _host_refusals(variant, shape)
    for name in KERNEL_FILES:  # imported here: the kernel files import this one
        yield from import_module(f"kernels.mamba3_mimo.cuda.{name}").refusals(variant, shape)


def _host_refusals(v: Variant, s: ScanShape) -> tuple[tuple[bool, str], ...]:
    """Return what no kernel of this lane can do."""
    return (
        (v.schedule not in SCHEDULES, f"schedule is '{v.schedule}'; allowed: {', '.join(SCHEDULES)}"),
        (s.R not in RANKS, f"rank is {s.R}; allowed: {_listed(RANKS)}"),
        (s.N not in STATE_SIZES, f"state size is {s.N}; allowed: {_listed(STATE_SIZES)}"),
        (s.P not in HEAD_WIDTHS, f"head width is {s.P}; allowed: {_listed(HEAD_WIDTHS)}"),
        (s.C not in CHUNK_SIZES, f"chunk_size is {s.C}; allowed: {_listed(CHUNK_SIZES)}"),
        (
            s.M not in CHUNK_ROWS,
            f"chunk_size * rank is {s.C} * {s.R} = {s.M}; allowed: {_listed(CHUNK_ROWS)}, what the matrix unit takes",
        ),
        (
            v.schedule == "chunk_parallel" and (s.L < s.C or s.L % s.C > 0),
            f"superchunk is {s.L}; allowed: a multiple of chunk_size = {s.C}",
        ),
        (not 0 <= v.pipeline_stages <= 2, f"pipeline_stages is {v.pipeline_stages}; allowed: 0, 1, 2"),
    )


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
