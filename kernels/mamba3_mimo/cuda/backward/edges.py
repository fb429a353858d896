"""Edges: what the gradients of decay and angle sum to from a token on, taken by the walk every EDGE tokens.

Both gradients of a token are sums over everything later. Adding up per-token contributions over a long stretch adds up
their rounding too; but the sum from token t on is the work of everything later on everything earlier, which the state
H entering t and its gradient E give at once: decay <E, H>, angle j the sum over p of E[j] H[N/2 + j] - E[N/2 + j] H[j].
Per-token contributions then need to be added up between two edges only. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.groups import Products, Sums, WalkStaging
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces.positions import EDGE
from kernels.mamba3_mimo.cuda.pieces.tiles import f32


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
