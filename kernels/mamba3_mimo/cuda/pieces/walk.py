"""Walk over the chunks of a super-chunk for kernels whose threads all load and compute: F1, F3 and B1."""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812, PLR0913, PLR0917

from dataclasses import replace
from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.pieces.loads import Loads, make_loads, panels
from ablate.kernels.mamba3_mimo.cuda.pieces.outer import Outer
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def staged(there: bool, shape: tuple[int, ...], dtype: str) -> Any:
    """Allocate a buffer in shared memory if `there`, else return None."""
    return T.alloc_shared(shape, dtype) if there else None


def threads_for(s: ScanShape) -> int:
    """Return the number of threads: two warp groups if the state or a chunk's rows are too large for one."""
    return 256 if s.N * s.P >= 128 * 128 or s.M == 128 else 128


def make_early_loads(s: ScanShape, v: Variant) -> Loads:
    """Return the loads of a kernel with small tiles, whose copies start one chunk earlier.

    One more slot lets the copies start before the previous chunk has been read. The kernel has little arithmetic to
    hide them behind.
    """
    return make_loads(s, replace(v, pipeline_stages=v.pipeline_stages + 1) if v.pipeline_stages > 0 else v)


def make_sum(s: ScanShape, v: Variant, loads: Loads, outer: Outer, start: Any, write: Any, copies: int) -> Any:
    """Return the walk of F1 and B1, the sum of the chunks' additions to a state, as two consecutive macros.

    begin(given, mine, x_s, bias, b, h, tx): start the copies of the first chunks and clear the sum.
    total(given, own, mine, raw_s, cs_s, x_s, w_s, weight, out, full, b, h, tx): add the chunks up into `out`.

    The kernel provides two macros. start(*given, b, h, n) starts the `copies` of chunk n. write(*own, x_s, w_s, n, tx)
    writes the right operand of the products, each token scaled by its number in w_s [L], a copy of `weight`.
    """
    nc, ahead = s.chunks, v.pipeline_stages

    @T.macro
    def begin(given, mine, x_s, bias, b, h, tx):
        for n in tuple(range(min(ahead, nc))):
            start(*given, b, h, n)
        outer.begin(mine, bias, h, tx, x_s)

    @T.macro
    def total(given, own, mine, raw_s, cs_s, x_s, w_s, weight, out, full, b, h, tx):
        for t in T.Parallel(s.L):
            w_s[t] = weight[b, h, t]
        T.sync_threads()
        for n in T.serial(nc):
            if ahead == 0:
                start(*given, b, h, n)
            elif n + ahead < nc:
                start(*given, b, h, n + ahead)
            loads.wait(full, n, nc, copies)
            if outer.slots == 1:
                T.sync_threads()
            write(*own, x_s, w_s, n, tx)
            outer.turn(mine, raw_s, cs_s, n, tx)
            T.sync_threads()
            outer.add(mine, x_s, n)
        outer.store(mine, out, b, h, tx)

    return begin, total


def make_output_start(s: ScanShape, loads: Loads) -> tuple[Any, int]:
    """Return F3's macro that starts the copies of chunk n, and the number of copies."""
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

    return start, 2 * len(loads.columns()) + 2 + s.gated * len(panels(P))
