"""Edges: what the gradients of decay and angle sum to from a token on, taken by the walk every EDGE tokens.

Both gradients of a token are sums over everything later. Adding up per-token contributions over a long stretch adds up
their rounding too; but the sum from token t on is the work of everything later on everything earlier, which the state
H entering t and its gradient E give at once: decay <E, H>, angle j the sum over p of E[j] H[N/2 + j] - E[N/2 + j] H[j].
Per-token contributions then need to be added up between two edges only. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.groups import Products, Sums, WalkStaging
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces.places import EDGE
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, f32


def make_edge(s: ScanShape, columns: Any, staged: WalkStaging, acc: Products, sums: Sums) -> tuple[Any, Any]:
    """Return (macro(one, t0): sum the edge at token t0, if any, into line_s; macro(edges, b, h, t0): write it).

    E is then the gradient of the state that enters t0, and slot `one` of h_s holds that state; `columns`: see
    gradients_io.py. The caller places a barrier between the two macros.
    Row n of `edges`: sum over p of E[n] H[n], and of E[n] H[(n + N/2) % N].
    """
    N, P, (groups, _, across) = s.N, s.P, columns

    @T.macro
    def summed(one, t0):
        if (t0 & (EDGE - 1)) == 0:
            for far in (0, 1):
                T.clear(sums.part_line)
                for n, p in T.Parallel(N, P):
                    sums.part_line[n, across(p)[0], across(p)[1]] += acc.E[n, p] * f32(
                        staged.h_s[one * N + (n + far * (N // 2)) % N, p]
                    )
                T.reduce_sum(sums.part_line, sums.line, dim=2)
                for n, group in T.Parallel(N, groups):
                    sums.line_s[far * groups + group, n] = sums.line[n, group]

    @T.macro
    def written(edges, b, h, t0):
        # shifted, not divided: TileLang 0.1.15 divides a falling index one too low where a chunk has 8 tokens
        if (t0 & (EDGE - 1)) == 0:
            for far, n in T.Parallel(2, N):
                edges[b, h, t0 >> EDGE.bit_length() - 1, far, n] = sums.line_s[far * groups, n] + (
                    sums.line_s[far * groups + 1, n] if groups == 2 else 0.0
                )

    return summed, written


def make_edge_from_tile(s: ScanShape, threads: int) -> Any:
    """Return macro(e_s, first, states, edges, b, h, t, tx) of `threads` threads: write the edge at token t, if any.

    e_s holds from row `first` on the gradient of the state that enters t, bf16 [N,P] in shared memory, ready to be
    read; states [B,H,S/C,N,P] bf16 those that enter the chunks. Row n of `edges`: sum over p of E[n] H[n], and of
    E[n] H[(n + N/2) % N].
    """
    S, N, P, C = s.S, s.N, s.P, s.C
    lanes = max(min(threads // N, P // 8), 1)
    width, rounds = P // lanes, -(-N * lanes // threads)

    @T.macro
    def row(e_s, first, states, edges, b, h, t, n, column):
        grad, own, far = (T.alloc_local((8,), BF16) for _ in range(3))
        sums = T.alloc_local((2,), F32)
        sums[0] = 0.0
        sums[1] = 0.0
        for i in T.serial(width // 8):
            for e in T.vectorized(8):
                grad[e] = e_s[first + n, column + i * 8 + e]
            for e in T.vectorized(8):
                own[e] = states[b, h, t // C, n, column + i * 8 + e]
            for e in T.vectorized(8):
                far[e] = states[b, h, t // C, (n + N // 2) % N, column + i * 8 + e]
            for e in T.unroll(8):
                sums[0] += f32(grad[e]) * f32(own[e])
                sums[1] += f32(grad[e]) * f32(far[e])
        for near in (1, 2, 4):
            if near < lanes:
                sums[0] += T.shfl_xor(sums[0], near)
                sums[1] += T.shfl_xor(sums[1], near)
        if column == 0:
            edges[b, h, t // EDGE, 0, n] = sums[0]
            edges[b, h, t // EDGE, 1, n] = sums[1]

    @T.macro
    def edge(e_s, first, states, edges, b, h, t, tx):
        if (t % EDGE == 0) & (t < S):
            for i in T.serial(rounds):
                if (rounds > 1) | (tx < N * lanes):
                    row(e_s, first, states, edges, b, h, t, (i * threads + tx) // lanes, tx % lanes * width)

    return edge
