"""Sums after the backward walk: heads into groups, and the walks' partial sums of weights and biases.

Letters: see shape.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812

from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape

THREADS = 128
ROWS = 8
"""Blocks of 8 columns per thread of `reduce_heads`, which is the number of loads in flight."""


def reduce_heads(s: ScanShape) -> Any:
    """B4: add up B3's sums over heads, of dq or dk, bf16 [B,sums,S/C,M,N], by groups -> bf16 [B,S,R,G,N].

    A block takes ROWS * THREADS blocks of 8 columns of a walk, in the order of B3's rows.
    """
    B, S, G, N, R, C, M = s.B, s.S, s.G, s.N, s.R, s.C, s.M
    lanes, eights = N // 8, S * R * N // 8

    @T.prim_func
    @takes(s, per_head="dqh", grouped="q")
    def b4_reduce_heads(per_head, grouped):
        with T.Kernel(-(-eights // (ROWS * THREADS)), G, B, threads=THREADS) as (blk, g, b):
            T.assume(b < s.most_walks)  # allows 32-bit offsets if the walks do
            tx = T.get_thread_binding()
            total, one = T.alloc_local((ROWS * 8,), F32), T.alloc_local((ROWS * 8,), BF16)
            for e in T.vectorized(ROWS * 8):
                total[e] = 0.0
            for i in T.serial(s.sums // G):
                for u in T.unroll(ROWS):
                    at = T.min((blk * ROWS + u) * THREADS + tx, eights - 1)
                    for e in T.vectorized(8):
                        one[u * 8 + e] = per_head[
                            b, g * (s.sums // G) + i, at // (lanes * M), at // lanes % M, at % lanes * 8 + e
                        ]
                for e in T.unroll(ROWS * 8):
                    total[e] += f32(one[e])
            for u in T.unroll(ROWS):
                at = (blk * ROWS + u) * THREADS + tx
                if at < eights:
                    row = at // lanes % M
                    for e in T.vectorized(8):
                        grouped[b, at // (lanes * M) * C + row % C, row // C, g, at % lanes * 8 + e] = bf16(
                            total[u * 8 + e]
                        )

    return b4_reduce_heads


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
    """B6: the walks' partial sums of the present ones of psi, zeta and phi -> [kinds,H*R,P]."""
    return column_sums(1 + s.gated + s.reduced, s.H * s.R, s.C // 8, s.P)


def sum_heads(s: ScanShape) -> Any:
    """B6: the walks' sums of the gradients of the biases of q and k and of D -> [1,rows,N], see head_sums.py."""
    return column_sums(1, 2 * s.H * s.R + -(-s.H // s.N), 1, s.N)
