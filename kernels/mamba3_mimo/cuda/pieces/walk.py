"""The walk of the kernels whose threads all load and compute over the chunks of a super-chunk: F1, F3 and B1.

Optional tensors of a program are annotated with `given`.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812, PLR0913, PLR0917

from dataclasses import replace
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces.loads import Loads, make_loads, panels


def given(there: bool, shape: tuple[int, ...], dtype: str) -> Any:
    """Return the annotation of a tensor that a program takes only when `there`; else its name is False in it."""
    return T.Tensor(shape, dtype) if there else False


def staged(there: bool, shape: tuple[int, ...], dtype: str) -> Any:
    """Allocate a buffer in shared memory that a program has only when `there`."""
    return T.alloc_shared(shape, dtype) if there else None


def threads_for(s: ScanShape) -> int:
    """Return how many threads compute: two warp groups when the state or the rows of a chunk are too much for one."""
    return 256 if s.N * s.P >= 128 * 128 or s.M == 128 else 128


def make_early_loads(s: ScanShape, v: Variant) -> tuple[Loads, bool]:
    """Return the loads of a kernel with small tiles, and whether a chunk's copies start at the begin of an earlier one.

    They then have one more slot, so that the copies start a whole chunk before theirs, not when the chunk before it has
    been read: there is little arithmetic to hide them behind.
    """
    early = v.pipeline_stages > 0
    return make_loads(s, replace(v, pipeline_stages=v.pipeline_stages + early)), early


def make_output_start(s: ScanShape, loads: Loads) -> tuple[Any, int]:
    """Return F3's macro that starts the copies of chunk n, and how many copies that are."""
    A, C, P = s.A, s.C, s.P

    @T.macro
    def start(q_raw, k_raw, v_s, z_s, cs_s, q, k, v, z, cs, full, b, h, n):
        t0, slot, held = n * C, loads.slot(n), loads.held_slot(n)
        loads.rows(q_raw, q, full, b, h, t0, n)
        loads.rows(k_raw, k, full, b, h, t0, n)
        loads.copy(v[b, t0 : t0 + C, h, :], v_s[slot * C : (slot + 1) * C, :], full, n)
        if s.gated:
            for cols in panels(P):
                loads.copy(z[b, t0 : t0 + C, h, cols], z_s[held * C : (held + 1) * C, cols], full, n)
        loads.copy(cs[b, h, t0 // C, :, :, :], cs_s[slot * (A // 4) : (slot + 1) * (A // 4), :, :], full, n)
        loads.posted(full, n)

    return start, 2 * s.R * len(loads.columns()) + 2 + s.gated * len(panels(P))
