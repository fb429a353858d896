"""Sums of the gradients of q and k in B3: over heads in memory, and over tokens in registers for the biases.

Heads of a group that one block walks in turn share one sum. The first head stores its tiles, and the copy engine adds
those of the others, rounded to bf16 after each head. The gradient of a bias is the sum over all tokens of one head.
Letters: see shape.py. Rows are i = r * C + c.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812

from typing import Any

import tilelang.language as T
from tvm.ir import Op

from ablate.kernels.mamba3_mimo.cuda.pieces.loads import make_store, panels
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import bf16, f32
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

_TMA_STORE = Op.get("tl.tma_store")
_BFLOAT16, _SWIZZLE_128, _L2_128 = 9, 3, 2
"""The driver's codes in a tensor map: dtype, swizzle of the tile, size of an L2 fetch."""


def map_of(out: Any, box: tuple[int, ...]) -> Any:
    """Return the tensor map of boxes `box` (innermost axis first) of a contiguous bf16 tensor, for swizzled tiles."""
    shape = tuple(reversed(out.shape))
    strides = [2]
    for size in shape[:-1]:
        strides.append(strides[-1] * size)
    whole = (*shape, *strides, *box, *(1 for _ in box))
    return T.create_tma_descriptor(_BFLOAT16, len(box), out.data, *whole, 0, _SWIZZLE_128, _L2_128, 0)


def make_keep(s: ScanShape, v: Variant, threads: int) -> Any:
    """Return macro(tile [M,N], sums [B,sums,S/C,M,N], b, i, n, first): store a chunk's tile, or add it to sum i.

    Tiles are swizzled. A bulk copy runs on, see `make_store`. An addition needs a completed store, see `make_settled`.
    """
    M, N = s.M, s.N
    store, _ = make_store(v)

    @T.macro
    def added(tile, sums, cols, b, i, n):
        if v.tma:
            if T.shuffle_elect(threads):
                source = T.access_ptr(tile[0, cols.start], "r", extent=M * (cols.stop - cols.start))
                where = map_of(sums, (cols.stop - cols.start, M, 1, 1, 1))
                T.evaluate(T.call_intrin("handle", _TMA_STORE, where, source, cols.start, 0, n, i, b, 1, 0))
                T.tma_store_arrive()
        else:
            for row, column in T.Parallel(M, cols.stop - cols.start):
                sums[b, i, n, row, cols.start + column] = bf16(
                    f32(sums[b, i, n, row, cols.start + column]) + f32(tile[row, cols.start + column])
                )

    @T.macro
    def keep(tile, sums, b, i, n, first):
        for cols in panels(N):
            if first:
                store(tile[:, cols], sums[b, i, n, :, cols])
            else:
                added(tile, sums, cols, b, i, n)

    return keep


def make_settled(v: Variant) -> Any:
    """Return macro(): wait until this thread's stores are complete, so that others may be added to them."""

    @T.macro
    def settled():
        if v.tma:
            T.tma_store_wait(0, read=False)

    return settled


def place_of_d(s: ScanShape, h: Any) -> tuple[Any, Any]:
    """Return the row and column of D's gradient in a walk's sums, behind those of the biases of q and k [2,H,R,N]."""
    return 2 * s.H * s.R + h // s.N, h % s.N


def make_bias_sums(s: ScanShape) -> tuple[Any, Any]:
    """Return macros add(sums, tile, at) and out(sums, p_heads, which, b, h), for fp32 fragments [R,N].

    `add` sums the rows of a bf16 tile over the tokens of each rank. tile[at(row, column)] is an element. `out` writes
    the sums of a walk for q (`which` 0) or k (1).
    """
    R, C, N = s.R, s.C, s.N

    @T.macro
    def add(sums, tile, at):
        for r, n in T.Parallel(R, N):
            for c in T.serial(C):
                sums[r, n] += f32(tile[at(r * C + c, n)])

    @T.macro
    def out(sums, p_heads, which, b, h):
        for r, n in T.Parallel(R, N):
            p_heads[b, (which * s.H + h) * R + r, n] = sums[r, n]

    return add, out
