"""One chunk of B3 in one role, from its loads to its stores, and the edges that it writes.

Edges are the sums of the gradients of decay and angle from a token on, computed every EDGE tokens. Both gradients of a
token are sums over everything later. Adding per-token contributions over a long distance also adds up their rounding.
But the sum from token t on is the work of everything later on everything earlier. The state H that enters t and its
gradient E give it at once: for the decay <E, H>, for angle j the sum over p of E[j] H[N/2 + j] - E[N/2 + j] H[j]. So
per-token contributions need to be added up only between two edges.

Letters: see shape.py. Rows are i = r * C + c.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward import gradients_io as io
from ablate.kernels.mamba3_mimo.cuda.backward import gradients_tiles as parts
from ablate.kernels.mamba3_mimo.cuda.backward import groups
from ablate.kernels.mamba3_mimo.cuda.backward.groups import Products, Sums, WalkStaging
from ablate.kernels.mamba3_mimo.cuda.backward.head_sums import make_bias_sums
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import Loads, make_store, panels, ranks_of
from ablate.kernels.mamba3_mimo.cuda.pieces.positions import EDGE
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import bf16, f32, make_angles, make_rotated_shared, rank_sum, spread
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def make_edge(s: ScanShape, columns: Any, staged: WalkStaging, acc: Products, sums: Sums) -> tuple[Any, Any]:
    """Return (macro(one, t0): sum the edge at token t0, if any, into line_s, macro(edges, b, h, t0): write it).

    E must be the gradient of the state that enters t0, and slot `one` of h_s must hold that state. `columns`: see
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
        # a shift, because TileLang 0.1.15 divides a falling index one too low if a chunk has 8 tokens
        if (t0 & (EDGE - 1)) == 0:
            for far, n in T.Parallel(2, N):
                edges[b, h, t0 >> EDGE.bit_length() - 1, far, n] = sums.line_s[far * groups, n] + (
                    sums.line_s[far * groups + 1, n] if groups == 2 else 0.0
                )

    return summed, written


def make_chunk(
    s: ScanShape, v: Variant, loads: Loads, start: Any, written: groups.Written, staged: groups.WalkStaging,
    weights: groups.Weights, ops: groups.ProductOperands, acc: groups.Products, sums: groups.Sums,
    rotation: groups.Rotation, sink: Any, *, lent: bool,
) -> Any:  # fmt: skip
    """Return macro(b, h, t0, n, nc, tx): the gradients of chunk n of nc, which starts at token t0.

    `start` is the macro of `make_start`. With `lent` gw_s lies in dmix_s. With `aggressive_smem_merge` sink [1] fp32
    takes unused sums, see `firsts`. The barriers here suffice unless the compiler overlaps buffers.
    """
    N, P, R, A, C, M = s.N, s.P, s.R, s.A, s.C, s.M
    threads = io.threads_of(s)
    split = min(64, N * 128 // threads)  # two warp groups share the columns of a product
    turning, depth, x_rows = spread(s, threads).angles, A // 4, io.x_slots(v, loads) * M
    spread_v, weigh = parts.make_spread_v(s, loads, threads), parts.make_weigh(s, loads)
    turned, angles = make_rotated_shared(s, threads, loads.at), make_angles(s, threads)
    do = parts.make_products(s, v, loads, threads, staged, ops, acc, sums, lent=lent)
    output_gate = parts.make_output_gate(s, loads, staged, weights, ops, acc, sums, lent=N == P)
    values = parts.make_values(s, v, loads, staged, weights, ops, acc, sums)
    q_back, k_back = parts.make_turned_back(s, threads, loads.at), parts.make_turned_back(s, threads)
    edge, edge_out = make_edge(s, io.columns_of(s, N), staged, acc, sums)
    turn_out, rows_out = parts.make_turn_out(s, threads), io.make_rows_out(s, sums, written)
    store, stored = make_store(v)
    bias_sum, _ = make_bias_sums(s)
    walks, heads, chunks = written.dqh.shape[:3]
    dq_ranks = T.view(written.dqh, [walks, heads, chunks * R, C, N])  # a tensor map has at most five dimensions

    def ranks_at(t0):
        return slice(t0 // C * R, (t0 // C + 1) * R)

    @T.macro
    def chunk(b, h, t0, n, nc, tx):
        held = loads.held_slot(n)
        one = loads.slot(n)
        if loads.ahead == 0:
            start(b, h, t0, n, tx)
        T.copy(acc.E, ops.e_s)
        loads.wait(staged.bar, n, nc, io.copies_of(s, v, loads))
        angles(rotation.cos, rotation.sin, staged.cs_s, one * depth, tx)
        weigh(ops.w_s, staged.scalar_s, n)
        if not v.psiv_cache:
            spread_v(staged.x_s, staged.v_s, weights.psi_s, n, tx)
        turned(ops.k_s, staged.k_raw, weights.k_bias_s, rotation.cos, rotation.sin, tx, n)
        stored()  # dk of the previous chunk, from q_s
        T.sync_threads()
        turned(ops.q_s, staged.q_raw, weights.q_bias_s, rotation.cos, rotation.sin, tx, n)
        T.sync_threads()
        do.scores(one)
        do.mix(weights.skip[0])
        T.sync_threads()
        do.outputs(held)  # recomputed for the gradients of the output gate
        output_gate(n)
        T.sync_threads()
        do.entries(one, held)
        if s.gated:
            for c, p in T.Parallel(C, P):
                written.dz[b, t0 + c, h, p] = bf16(parts.lent_sum(ops.dgate_s, loads, n, c, p, N == P))
        do.weighted()
        edge(one, t0)
        T.sync_threads()
        edge_out(written.edges, b, h, t0)
        do.queries(held)
        parts.put(acc.dn, staged.q_raw, loads, n, True)
        for e in T.unroll(turning):
            rotation.turn[e] = 0.0
        do.keys()
        T.sync_threads()
        q_back(staged.q_raw, ops.q_s, rotation.turn, rotation.cos, rotation.sin, tx, n)
        do.finished()
        if v.aggressive_smem_merge:  # the products end here, not where they begin
            sink[0] = parts.firsts((ops.k_s, staged.x_s, ops.g_s, ops.gw_s, ops.e_s, ops.mix_s, ops.dmix_s))
        T.fence_proxy_async()
        T.sync_threads()
        for cols in loads.columns():
            store(ranks_of(staged.q_raw, C)[loads.ranks(n), :, cols], dq_ranks[b, h, ranks_at(t0), :, cols])
        bias_sum(sums.q_bias, staged.q_raw, lambda line, column: loads.at(n, line, column))
        T.copy(acc.dk, ops.q_s)
        values(held)
        if loads.ahead > 0:
            stored()
            if not v.tma:
                T.sync_threads()
            if n + loads.ahead < nc:
                later = t0 - loads.ahead * C
                start(b, h, later, n + loads.ahead, tx)
        T.sync_threads()
        k_back(ops.q_s, ops.k_s, rotation.turn, rotation.cos, rotation.sin, tx)
        turn_out(rotation.turn_s, rotation.turn, tx)
        for c, p in T.Parallel(C, P):
            written.dv[b, t0 + c, h, p] = bf16(rank_sum(staged.x_s, held * M + c if x_rows > M else c, p, R, C))
        rows_out(b, h, t0)
        for i in T.Parallel(M):
            sums.d_row[i] += sums.dsame_s[i, i // C]
        T.fence_proxy_async()
        T.sync_threads()
        for cols in panels(N, split):
            store(ops.q_s[:, cols], written.dkh[b, h, t0 // C, :, cols])
        bias_sum(sums.k_bias, ops.q_s, lambda line, column: (line, column))
        for c, j in T.Parallel(C, A):
            written.dtheta[b, h, t0 + c, j] = rank_sum(rotation.turn_s, c, j, R, C)
        if loads.ahead == 0:
            stored()
            T.sync_threads()

    return chunk
