"""Edges: what the gradients of decay and angle sum to from a token on, taken by the walk every EDGE tokens.

Both gradients of a token are sums over everything later. Adding up per-token contributions over a long stretch adds up
their rounding too; but the sum from token t on is the work of everything later on everything earlier, which the state
H entering t and its gradient E give at once: decay <E, H>, angle j the sum over p of E[j] H[N/2 + j] - E[N/2 + j] H[j].
Per-token contributions then need to be added up between two edges only. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0913, PLR0917
# mypy: ignore-errors

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.shape import ScanShape

BF16, F32 = "bfloat16", "float32"
EDGE = 64
"""Tokens between two edges; a multiple of every chunk size."""


def edge_size(s: ScanShape) -> tuple[int, ...]:
    """Return the size of the tensor of edges, fp32 [B,H,ceil(S/EDGE),2,N]: see `make_edge`; nobody writes the first."""
    return s.B, s.H, -(-s.S // EDGE), 2, s.N


def make_edge(s: ScanShape, threads: int) -> Any:
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
                sums[0] += T.Cast(F32, grad[e]) * T.Cast(F32, own[e])
                sums[1] += T.Cast(F32, grad[e]) * T.Cast(F32, far[e])
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
