"""Pieces of the backward walk between its loads and its stores: PsiV, weights, products, gate, the rotation undone.

`t` holds the walk's buffers by their names in backward.py. Rows are i = r * C + c. Letters: see shape.py. The walk
places its own barriers: a piece says what it needs done before.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0915, PLR0917
# mypy: ignore-errors

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward_io import fold_of, lends, part, x_slots
from kernels.mamba3_mimo.cuda.loads import Loads
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.tiles import BF16, F32, bf16, f32, mixed_sum, pair_sum, plain_row, spread
from kernels.mamba3_mimo.cuda.variant import Variant


def make_weigh(s: ScanShape, loads: Loads) -> Any:
    """Return macro(w_s [C,C+8], scalar_s [3 * slots,C], n): the weights of chunk n.

    w[t, u] is the weight of the write of time u in the output of time t; column C holds the decay from the start of the
    chunk to t, column C + 1 the weight of the write of time t at the end of the chunk.
    """
    C = s.C

    @T.macro
    def weigh(w_s, scalar_s, n):
        lc = loads.held_slot(n) * 3
        for t, u in T.Parallel(C, C):
            decay = T.exp2(T.min(scalar_s[lc, t] - scalar_s[lc, u], 0.0)) * scalar_s[lc + 1, u]
            w_s[t, u] = T.if_then_else(t > u, decay, T.if_then_else(t == u, scalar_s[lc + 2, t], 0.0))
        for t in T.Parallel(C):
            w_s[t, C] = T.exp2(scalar_s[lc, t])
            w_s[t, C + 1] = T.exp2(scalar_s[lc, C - 1] - scalar_s[lc, t]) * scalar_s[lc + 1, t]

    return weigh


def make_spread_v(s: ScanShape, loads: Loads, threads: int) -> Any:
    """Return macro(x_s [M,P], v_s, psi_s [R,P], n, tx): x[r * C + c, p] = v[c, p] * psi[r, p] for chunk n."""
    C, R, P = s.C, s.R, s.P
    w = min(4, C * P // threads)
    rows = threads * w // P

    @T.macro
    def spread_v(x_s, v_s, psi_s, n, tx):
        wide = T.alloc_local((C // rows * w,), F32)
        c, p = tx // (P // w), tx % (P // w) * w
        for u in T.unroll(C // rows):
            for e in T.vectorized(w):
                wide[u * w + e] = f32(v_s[loads.held_slot(n) * C + u * rows + c, p + e])
        for r in T.unroll(R):
            for u in T.unroll(C // rows):
                for e in T.vectorized(w):
                    x_s[r * C + u * rows + c, p + e] = bf16(wide[u * w + e] * psi_s[r, p + e])

    return spread_v


def make_turned_back(s: ScanShape, threads: int, at: Any = plain_row) -> Any:
    """Return macro(grad_s, tile_s [M,N], turn, cos, sin, tx, n): undo the rotation of grad_s in place.

    grad_s holds the gradient of the rotated tile_s, bf16; `at(n, row, column)` is the index in grad_s of chunk n. Adds
    the gradient of the thread's angles to `turn`.
    """
    M, half = s.M, s.N // 2
    way = spread(s, threads)
    turns = tuple(range(way.turns))

    @T.macro
    def group(grad_s, tile_s, turn, cos, sin, lo, hi, left, right, n, u, g, tx):
        row = tx % M
        for e in T.vectorized(8):
            lo[e] = grad_s[at(n, row, g * 8 + e)]
        for e in T.vectorized(8):
            hi[e] = grad_s[at(n, row, half + g * 8 + e)]
        for e in T.vectorized(8):
            left[e] = tile_s[row, g * 8 + e]
        for e in T.vectorized(8):
            right[e] = tile_s[row, half + g * 8 + e]
        for e in T.unroll(8):
            turn[u * 8 + e] += f32(hi[e]) * f32(left[e]) - f32(lo[e]) * f32(right[e])
        for e in T.vectorized(8):
            grad_s[at(n, row, g * 8 + e)] = bf16(f32(lo[e]) * f32(cos[u * 8 + e]) + f32(hi[e]) * f32(sin[u * 8 + e]))
        for e in T.vectorized(8):
            grad_s[at(n, row, half + g * 8 + e)] = bf16(
                f32(hi[e]) * f32(cos[u * 8 + e]) - f32(lo[e]) * f32(sin[u * 8 + e])
            )

    @T.macro
    def turned_back(grad_s, tile_s, turn, cos, sin, tx, n=0):
        lo, hi = T.alloc_local((8,), BF16), T.alloc_local((8,), BF16)
        left, right = T.alloc_local((8,), BF16), T.alloc_local((8,), BF16)
        for u in turns:
            if way.all_turn(u):
                group(grad_s, tile_s, turn, cos, sin, lo, hi, left, right, n, u, tx // M + u * way.step, tx)
            else:
                if tx // M + u * way.step < way.turning:
                    group(grad_s, tile_s, turn, cos, sin, lo, hi, left, right, n, u, tx // M + u * way.step, tx)

    return turned_back


def make_turn_out(s: ScanShape, threads: int) -> Any:
    """Return macro(turn_s [M,A+4], turn, tx): the gradients of the thread's angles into shared memory."""
    M = s.M
    way = spread(s, threads)
    turns = tuple(range(way.turns))

    @T.macro
    def group(turn_s, turn, u, g, tx):
        for four in T.unroll(2):
            for e in T.vectorized(4):
                turn_s[tx % M, g * 8 + four * 4 + e] = turn[u * 8 + four * 4 + e]

    @T.macro
    def turn_out(turn_s, turn, tx):
        for u in turns:
            if way.all_turn(u):
                group(turn_s, turn, u, tx // M + u * way.step, tx)
            else:
                if tx // M + u * way.step < way.turning:
                    group(turn_s, turn, u, tx // M + u * way.step, tx)

    return turn_out


def make_products(s: ScanShape, v: Variant, loads: Loads, threads: int) -> Any:
    """Return the matrix products of a chunk as macros; those of one macro run together if the matrix unit can.

    `outputs`(t, one, held): y [M,P] and the weighted scores mix_s. Before: q~, k~, x, the weights.
    `entries`(t, one, held): E of the previous chunk, the weighted gradients of the scores dmix_s, and in dn the state's
    part of dq~. Before: g_s, gw_s. `queries`(t): the rest of dq~. Before: dmix_s.
    `keys`(t, held): dk~ in dn and dx in y. Before: dmix_s, e_s.
    """
    C, M, N, P, xs = s.C, s.M, s.N, s.P, x_slots(v, loads)
    shared = M >= P and not lends(s, v)
    paired, wide = M % 64 == 0, M % 64 == 0 and N % 64 == 0

    @T.macro
    def product(a, b, c, trans_a, trans_b, clear, together):
        if together:
            T.wgmma_gemm(a, b, c, transpose_A=trans_a, transpose_B=trans_b, clear_accum=clear)
        else:
            T.gemm(a, b, c, transpose_A=trans_a, transpose_B=trans_b, clear_accum=clear)

    @T.macro
    def landed(c, size, together):
        if together:
            T.warpgroup_fence_operand(c, num_regs=size // threads)

    @T.macro
    def outputs(t, skip, one, held):
        product(t.q_s, t.k_s, t.score, False, True, True, paired)
        T.gemm(t.q_s, part(t.h_s, one, loads.slots, N), t.y, clear_accum=True)
        landed(t.score, M * M, paired)
        for i, j in T.Parallel(M, M):
            if i % C == j % C:
                t.same_s[i, j // C] = t.score[i, j]
        for i, j in T.Parallel(M, M):
            t.score[i, j] = t.score[i, j] * t.w_s[i % C, j % C] + T.if_then_else(i == j, skip, 0.0)
        T.copy(t.score, t.mix_s)
        for i, p in T.Parallel(M, P):
            t.y[i, p] = t.y[i, p] * t.w_s[i % C, C]
        T.sync_threads()
        T.gemm(t.mix_s, part(t.x_s, held, xs, M), t.y)

    @T.macro
    def entries(t, one, held):
        for i, p in T.Parallel(N, P):
            t.E[i, p] = t.E[i, p] * t.w_s[C - 1, C]
        product(t.q_s, t.gw_s[:, :P], t.E, True, False, False, wide)
        product(t.g_s, part(t.x_s, held, xs, M), t.dscore, False, True, True, paired)
        T.gemm(t.g_s, part(t.h_s, one, loads.slots, N), t.dn, transpose_B=True, clear_accum=True)
        landed(t.E, N * P, wide)
        landed(t.dscore, M * M, paired)
        for i, j in T.Parallel(M, M):
            if i % C == j % C:
                t.dsame_s[i, j // C] = t.dscore[i, j]
        for i, j in T.Parallel(M, M):
            t.dscore[i, j] = t.dscore[i, j] * t.w_s[i % C, j % C]
        if shared:  # gw_s is in dmix_s
            T.sync_threads()
        T.copy(t.dscore, t.dmix_s)
        for i, j in T.Parallel(M, N):
            t.dn[i, j] = t.dn[i, j] * t.w_s[i % C, C]

    @T.macro
    def queries(t):
        T.gemm(t.dmix_s, t.k_s, t.dn)

    @T.macro
    def keys(t, held):
        product(part(t.x_s, held, xs, M), t.e_s, t.dn, False, True, True, paired)
        T.gemm(t.k_s, t.e_s, t.y, clear_accum=True)
        landed(t.dn, M * N, paired)
        for i, j in T.Parallel(M, N):
            t.dn[i, j] = t.dn[i, j] * t.w_s[i % C, C + 1]
        for i, p in T.Parallel(M, P):
            t.y[i, p] = t.y[i, p] * t.w_s[i % C, C + 1]
        product(t.dmix_s, t.q_s, t.dn, True, False, False, paired)
        T.gemm(t.mix_s, t.g_s, t.y, transpose_A=True)
        landed(t.dn, M * N, paired)

    return SimpleNamespace(outputs=outputs, entries=entries, queries=queries, keys=keys)


@T.macro
def put(tile, staging, loads, n, lent):
    """Round a fragment [M,width] to bf16 into a shared buffer; `lent`: into chunk n's slot of a staging buffer."""
    rows = tile.shape[0]
    if not lent:
        T.copy(tile, staging)
    elif loads.two_d:
        T.copy(tile, part(staging, loads.slot(n), loads.slots, rows))
    else:
        for i, j in T.Parallel(*tile.shape):
            staging[loads.at(n, i, j)] = bf16(tile[i, j])


def lent_sum(tile: Any, loads: Loads, n: Any, c: Any, p: Any, lent: bool) -> Any:
    """Return the sum over ranks of tile[r * C + c, p]; `lent`: of chunk n's slot of a staging buffer."""
    ranks, chunk = loads.s.R, loads.s.C
    total = 0.0
    for r in range(ranks):
        total = total + f32(tile[loads.at(n, r * chunk + c, p) if lent else (r * chunk + c, p)])
    return total


def make_gate(s: ScanShape, loads: Loads, *, lent: bool) -> Any:
    """Return macro(t, n): from y the gradient g with respect to it, that of the gate, and their partial sums.

    Leaves g and g times the decay from the start of the chunk in g_s and gw_s, the gate's in dgate_s, perhaps `lent` by
    k_raw, and <g, y> in row_s[0].
    """
    C, M, P = s.C, s.M, s.P
    fold = fold_of(s)

    @T.macro
    def gate(t, n):
        one = loads.slot(n)
        for i, p in T.Parallel(M, P):
            d32 = f32(t.do_s[one * C + i % C, p] if s.reduced else t.do_s[one * M + i, p])
            z32 = f32(t.z_s[one * C + i % C, p]) if s.gated else 0.0
            half_u = z32 * 0.5 * t.zeta_s[i // C, p] if s.gated else 0.0
            bent = T.tanh(half_u) if s.gated else 0.0
            silu = half_u * bent + half_u if s.gated else 1.0
            gated = d32 * silu
            if s.reduced:
                t.phi_acc[fold(i), p] += gated * t.y[i, p]
            g32 = gated * t.phi_s[i // C, p] if s.reduced else gated
            if s.gated:
                slope = silu * (0.5 - 0.5 * bent) + (0.5 + 0.5 * bent)
                du = d32 * t.y[i, p] * slope
                t.zeta_acc[fold(i), p] += du * z32
                t.dgate[i, p] = bf16(du * t.zeta_s[i // C, p] * (t.phi_s[i // C, p] if s.reduced else 1.0))
            t.g[i, p] = bf16(g32)
            t.gw[i, p] = bf16(g32 * t.w_s[i % C, C])
            t.y[i, p] = g32 * t.y[i, p]
        T.copy(t.g, t.g_s)
        T.copy(t.gw, t.gw_s[:, :P])
        T.reduce_sum(t.y, t.row, dim=1)
        T.copy(t.row, t.row_s[0, :])
        if s.gated:
            put(t.dgate, t.dgate_s, loads, n, lent)

    return gate


def make_values(s: ScanShape, v: Variant, loads: Loads) -> Any:
    """Return macro(t, held): from dx in y the gradient of v per rank in x_s, psi's partial sums, the rows of row_s.

    row_s: 1 is <x, dx>, 2 the gradient of gamma, 3 the same step's share of 0 and 1.
    """
    C, M, P, R, xs = s.C, s.M, s.P, s.R, x_slots(v, loads)
    fold = fold_of(s)

    @T.macro
    def values(t, held):
        for i, p in T.Parallel(M, P):
            v32 = f32(t.v_s[held * C + i % C, p])
            t.psi_acc[fold(i), p] += t.y[i, p] * v32
            dx = t.y[i, p] * t.psi_s[i // C, p]
            t.g[i, p] = bf16(dx)
            t.y[i, p] = dx * v32
        T.copy(t.g, part(t.x_s, held, xs, M))
        T.reduce_sum(t.y, t.row, dim=1)
        T.copy(t.row, t.row_s[1, :])
        for i in T.Parallel(M):
            t.row_s[2, i] = pair_sum(t.same_s, t.dsame_s, i, R)
            t.row_s[3, i] = mixed_sum(t.mix_s, t.dsame_s, i, R, C)

    return values


@T.macro
def pin(sink, tile):
    """Make the compiler keep a shared buffer up to here.

    It ends a buffer's life at the last use in the text, also in a loop whose next turn reads the buffer again.
    """
    sink[0] += f32(tile[tuple(0 for _ in tile.shape)])
