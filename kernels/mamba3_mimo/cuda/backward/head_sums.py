"""What B3 adds up of the gradients of q and k: over heads in memory, over tokens, for the biases, in registers.

Heads of a group that one block walks in turn share one sum: the first one stores its tiles, the copy engine adds those
of the others, rounded to bf16 after each. The gradient of a bias is the sum over all tokens of one head alone. Letters:
see shape.py. Rows are i = r * C + c.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from typing import Any

import tilelang.language as T
from tvm.ir import Op

from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces.loads import make_store, panels
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32

_TMA_STORE = Op.get("tl.tma_store")
_BFLOAT16, _SWIZZLE_128, _L2_128 = 9, 3, 2
"""The driver's names of what a tensor map describes: its dtype, the swizzle of the tile, what L2 fetches at once."""


def _map_of(out: Any, box: tuple[int, ...]) -> Any:
    """Return the tensor map of parts `box` of a contiguous bf16 tensor, innermost axis first, for swizzled tiles."""
    shape = tuple(reversed(out.shape))
    strides = [2]
    for size in shape[:-1]:
        strides.append(strides[-1] * size)
    whole = (*shape, *strides, *box, *(1 for _ in box))
    return T.create_tma_descriptor(_BFLOAT16, len(box), out.data, *whole, 0, _SWIZZLE_128, _L2_128, 0)


def make_keep(s: ScanShape, v: Variant, threads: int) -> Any:
    """Return macro(tile [M,N], sums [B,sums,S/C,M,N], b, i, n, first): store a chunk's tile, or add it to sum i.

    Swizzled tiles; a bulk copy runs on, see `make_store`. What is added to must be written, see `make_settled`.
    """
    M, N = s.M, s.N
    store, _ = make_store(v)

    @T.macro
    def added(tile, sums, cols, b, i, n):
        if v.tma:
            if T.shuffle_elect(threads):
                source = T.access_ptr(tile[0, cols.start], "r", extent=M * (cols.stop - cols.start))
                where = _map_of(sums, (cols.stop - cols.start, M, 1, 1, 1))
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
    """Return macro(): what this thread has begun to store is written, so that it may be added to."""

    @T.macro
    def settled():
        if v.tma:
            T.tma_store_wait(0, read=False)

    return settled


def place_of_d(s: ScanShape, h: Any) -> tuple[Any, Any]:
    """Return the row and column of D's gradient among a walk's sums: behind q's bias and k's, [2,H,R,N]."""
    return 2 * s.H * s.R + h // s.N, h % s.N


def blocks_of_warp(s: ScanShape, threads: int) -> int:
    """Return how many blocks of 8 columns a warp adds up."""
    return -(-s.N // (8 * threads // 32))


def sums_of_thread(s: ScanShape, threads: int) -> int:
    """Return how many fp32 sums a thread has: 4 for every 16 rows of results."""
    return -(-2 * blocks_of_warp(s, threads) * s.R // 16) * 4


def make_bias_sums(s: ScanShape, threads: int) -> tuple[Any, Any]:
    """Return macros add(sums, tile, at, which, tx) and out(sums, p_heads, b, h, tx).

    `add`: the rows of a bf16 tile whose place [row, column] is tile[at(row, column)], of q (`which` 0) or k (1).
    The matrix unit adds: 16 rows of one rank, times a left operand of ones in row i, go to row i of a result [16,8] in
    4 registers. A warp has `blocks` blocks of 8 columns; rows of its results: (tensor, block, rank).
    """
    R, C, M, N, warps, blocks = s.R, s.C, s.M, s.N, threads // 32, blocks_of_warp(s, threads)
    rows = 2 * blocks * R

    def column(block: Any, tx: Any) -> Any:
        return (tx // 32 * blocks + block) * 8

    @T.macro
    def summed(sums, right, step, which, block, tx):
        ones = T.alloc_local((8,), BF16)
        result = (which * blocks + block) * R + step * 16 // C
        for half in (0, 1):
            row = (which * blocks + block) * R + (step * 16 + half * 8) // C
            for lower in (0, 1):
                for e in T.vectorized(2):
                    ones[half * 4 + lower * 2 + e] = bf16(
                        T.if_then_else(tx % 32 // 4 == row % 8, 1.0, 0.0) if row % 16 // 8 == lower else 0.0
                    )
        T.ptx_mma(
            F32, "m16n8k16", "row", "col", "bf16", "bf16", "fp32", ones.data, 0, right.data, step % 2 * 4,
            sums.data, result // 16 * 4, T.bool(False),
        )  # fmt: skip

    @T.macro
    def of_block(sums, tile, at, which, block, tx):
        right = T.alloc_local((8,), BF16)
        for pair in tuple(range(M // 32)):
            source = tile[at(pair * 32 + tx % 32, column(block, tx))]
            T.ptx_ldmatrix(
                T.bool(True), 4, T.access_ptr(source, "r", extent=8), T.access_ptr(right[0], "w", extent=8)
            )  # fmt: skip
            for step in (0, 1):
                summed(sums, right, pair * 2 + step, which, block, tx)

    @T.macro
    def add(sums, tile, at, which, tx):
        for block in tuple(range(blocks)):
            if warps * blocks * 8 == N:
                of_block(sums, tile, at, which, block, tx)
            else:
                if column(block, tx) < N:
                    of_block(sums, tile, at, which, block, tx)

    @T.macro
    def out(sums, p_heads, b, h, tx):
        for result in tuple(range(sums_of_thread(s, threads) // 4)):
            for lower in (0, 1):
                row = result * 16 + lower * 8 + tx % 32 // 4
                if (row < rows) & (column(row // R % blocks, tx) < N):
                    for e in T.vectorized(2):
                        p_heads[
                            b, (row // (blocks * R) * s.H + h) * R + row % R,
                            column(row // R % blocks, tx) + tx % 4 * 2 + e,
                        ] = sums[result * 4 + lower * 2 + e]  # fmt: skip

    return add, out
