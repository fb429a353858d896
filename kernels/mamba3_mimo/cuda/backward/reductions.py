"""Sums after the walk: heads into groups, partial sums of weights and biases.

Letters: see shape.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912

from functools import reduce
from operator import add
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32

THREADS = 128
ROWS = 8
"""Tokens of one thread of `reduce_heads`."""


def head_block(s: ScanShape) -> int:
    """Return the tokens of one block of `reduce_heads`, whose rows of N / 8 threads work on ROWS tokens each."""
    return ROWS * 8 * THREADS // s.N


def reduce_heads(s: ScanShape) -> Any:
    """B4: sum per-head dq or dk [B,S,R,H,N] bf16 over the heads of a group -> [B,S,R,G,N] bf16.

    Also `p_bias` fp32 [B,S/head_block,H,R,N]: the sum over the block's tokens, per head.
    """
    B, S, H, G, N, R = s.B, s.S, s.H, s.G, s.N, s.R
    per_group, block, lanes = s.heads_per_group, head_block(s), s.N // 8
    rows, blocks = THREADS // lanes, -(-S // block)

    @T.prim_func
    def b4_reduce_heads(
        per_head: T.Tensor((B, S, R, H, N), BF16),
        grouped: T.Tensor((B, S, R, G, N), BF16),
        p_bias: T.Tensor((B, blocks, H, R, N), F32),
    ):
        with T.Kernel(blocks, R * G, B, threads=THREADS) as (blk, rg, b):
            T.assume(b < s.most_walks)  # so offsets have 32 bits where these do
            tx = T.get_thread_binding()
            total = T.alloc_local((ROWS * 8,), F32)
            one = T.alloc_local((ROWS * 8,), BF16)
            column = T.alloc_local((8,), F32)
            bias_s = T.alloc_shared((2, rows, N + 4), F32)
            for e in T.vectorized(ROWS * 8):
                total[e] = 0.0
            for i in T.serial(per_group):
                h = (rg % G) * per_group + i
                for u in T.unroll(ROWS):
                    at = T.min(blk * block + u * rows + tx // lanes, S - 1)
                    for e in T.vectorized(8):
                        one[u * 8 + e] = per_head[b, at, rg // G, h, tx % lanes * 8 + e]
                for e in T.unroll(8):
                    column[e] = 0.0
                for u in T.unroll(ROWS):
                    keep = T.if_then_else(blk * block + u * rows + tx // lanes < S, 1.0, 0.0)
                    for e in T.unroll(8):
                        total[u * 8 + e] += f32(one[u * 8 + e])
                        column[e] += f32(one[u * 8 + e]) * keep
                for half in (0, 4):
                    for e in T.vectorized(4):
                        bias_s[i % 2, tx // lanes, tx % lanes * 8 + half + e] = column[half + e]
                T.sync_threads()
                for u in T.unroll(-(-N // THREADS)):
                    if u * THREADS + tx < N:
                        p_bias[b, blk, h, rg // G, u * THREADS + tx] = line_sum(bias_s, i % 2, u * THREADS + tx, rows)
            for u in T.unroll(ROWS):
                if blk * block + u * rows + tx // lanes < S:
                    for e in T.vectorized(8):
                        grouped[b, blk * block + u * rows + tx // lanes, rg // G, rg % G, tx % lanes * 8 + e] = bf16(
                            total[u * 8 + e]
                        )

    return b4_reduce_heads


def line_sum(tile: Any, which: Any, n: Any, rows: int) -> Any:
    """Return the sum of tile[which, :, n]."""
    return reduce(add, (tile[which, row, n] for row in range(rows)))


def column_sums(kinds: int, rows: int, inner: int, width: int) -> Any:
    """B6: sums of partial sums, fp32 [kinds,blocks,rows*inner,width] -> [kinds,rows,width]."""
    lanes, blocks = min(width, 32) // 4, T.dynamic("blocks")
    ways, ahead = 2 * THREADS // lanes, 8

    @T.prim_func
    def b6_column_sums(
        partial: T.Tensor((kinds, blocks, rows * inner, width), F32),
        sums: T.Tensor((kinds, rows, width), F32),
    ):
        with T.Kernel(width // (4 * lanes), rows, kinds, threads=2 * THREADS) as (bx, row, kind):
            one, total = T.alloc_local((4 * ahead,), F32), T.alloc_local((4,), F32)
            total_s = T.alloc_shared((ways, 4 * lanes + 4), F32)
            tx = T.get_thread_binding()
            column = bx * 4 * lanes + tx % lanes * 4
            for e in T.vectorized(4):
                total[e] = 0.0
            for turn in T.serial(T.ceildiv(blocks * inner, ways * ahead)):
                for u in T.unroll(ahead):
                    at = T.min((turn * ahead + u) * ways + tx // lanes, blocks * inner - 1)
                    for e in T.vectorized(4):
                        one[u * 4 + e] = partial[kind, at // inner, row * inner + at % inner, column + e]
                for u in T.unroll(ahead):
                    if (turn * ahead + u) * ways + tx // lanes < blocks * inner:
                        for e in T.unroll(4):
                            total[e] += one[u * 4 + e]
            for e in T.vectorized(4):
                total_s[tx // lanes, tx % lanes * 4 + e] = total[e]
            T.sync_threads()
            if tx < 4 * lanes:
                total[0] = 0.0
                for way in T.unroll(ways):
                    total[0] += total_s[way, tx]
                sums[kind, row, bx * 4 * lanes + tx] = total[0]

    return b6_column_sums


def sum_weights(s: ScanShape) -> Any:
    """B6: the walk's partial sums of psi, zeta and phi, whichever are given -> [kinds,H*R,P]."""
    return column_sums(1 + s.gated + s.reduced, s.H * s.R, s.C // 8, s.P)


def sum_biases(s: ScanShape) -> Any:
    """B6: the partial sums of `reduce_heads` for q and k -> [2,H*R,N]."""
    return column_sums(2, s.H * s.R, 1, s.N)
