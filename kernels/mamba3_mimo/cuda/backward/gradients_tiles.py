"""Pieces of the backward walk between its loads and its stores: PsiV, weights, products, gate, the rotation undone.

`t` holds the walk's buffers by their names in gradients.py. Rows are i = r * C + c. Letters: see shape.py. The walk
places its own barriers: a piece says what it needs done before.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0915, PLR0917

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.gradients_io import columns_of, fold_of, part, x_slots
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces import scalar
from kernels.mamba3_mimo.cuda.pieces.loads import Loads
from kernels.mamba3_mimo.cuda.pieces.scalar import Pair
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32, mixed_sum, pair_sum, plain_row, spread


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
            w_s[t, u] = scalar.pair_weight(
                t, u, scalar_s[lc, t], scalar_s[lc, u], scalar_s[lc + 1, u], scalar_s[lc + 2, t]
            )
        for t in T.Parallel(C):
            w_s[t, C] = scalar.read_scale(scalar_s[lc, t])
            w_s[t, C + 1] = scalar.write_scale(scalar_s[lc, C - 1], scalar_s[lc, t], scalar_s[lc + 1, t])

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
                    x_s[r * C + u * rows + c, p + e] = bf16(scalar.psiv(wide[u * w + e], psi_s[r, p + e]))

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
        for e in T.vectorized(8):
            turn[u * 8 + e] += scalar.moment(Pair(f32(lo[e]), f32(hi[e])), Pair(f32(left[e]), f32(right[e])))
        for e in T.vectorized(8):
            grad_s[at(n, row, g * 8 + e)] = bf16(
                scalar.turned_back(f32(lo[e]), f32(hi[e]), f32(cos[u * 8 + e]), f32(sin[u * 8 + e])).lo
            )
        for e in T.vectorized(8):
            grad_s[at(n, row, half + g * 8 + e)] = bf16(
                scalar.turned_back(f32(lo[e]), f32(hi[e]), f32(cos[u * 8 + e]), f32(sin[u * 8 + e])).hi
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


def make_products(s: ScanShape, v: Variant, loads: Loads, threads: int, *, lent: bool) -> Any:
    """Return the matrix products of a chunk as macros: some start products, others wait for them and go on from there.

    Where every product fills the matrix unit they run while other work is done; elsewhere each is waited for at once.
    In order: `scores`(t, one): q~ k~ and what the entering state adds to y [M,P]. `mix`(t, skip): the weighted scores
    mix_s. `outputs`(t, held): y. Before: mix_s of every thread. `entries`(t, one, held): E of the chunk before, the
    gradients of the scores, the state's part of dq~ in dn and of dx in y. Before: g_s, gw_s, e_s. `weighted`(t): the
    weighted gradients of the scores dmix_s; E is done. `queries`(t, held): dq~ in dn, and the state's part of dk~ in
    dk. Before: dmix_s. `keys`(t): the rest of dx and of dk~. `finished`(t): dx in y and dk~ in dk are done. `lent`:
    gw_s lies in dmix_s.
    """
    C, M, N, P, xs = s.C, s.M, s.N, s.P, x_slots(v, loads)
    early = M % 64 == 0 and N % 64 == 0

    @T.macro
    def product(a, b, c, trans_a, trans_b, clear):
        if early:
            T.wgmma_gemm(a, b, c, transpose_A=trans_a, transpose_B=trans_b, clear_accum=clear)
        else:
            T.gemm(a, b, c, transpose_A=trans_a, transpose_B=trans_b, clear_accum=clear)

    @T.macro
    def landed(c, size, running):
        # c is done when at most `running` products, those started last, still run
        if early:
            T.warpgroup_wait(running)
            T.warpgroup_fence_operand(c, num_regs=size // threads)

    @T.macro
    def scores(t, one):
        product(t.q_s, t.k_s, t.score, False, True, True)
        product(t.q_s, part(t.h_s, one, loads.slots, N), t.y, False, False, True)

    @T.macro
    def mix(t, skip):
        landed(t.score, M * M, 1)
        for i, j in T.Parallel(M, M):
            if i % C == j % C:
                t.same_s[i, j // C] = t.score[i, j]
        for i, j in T.Parallel(M, M):
            t.score[i, j] = scalar.weighted(t.score[i, j], t.w_s[i % C, j % C], i == j, skip)
        T.copy(t.score, t.mix_s)
        landed(t.y, M * P, 0)
        for i, p in T.Parallel(M, P):
            t.y[i, p] = t.y[i, p] * t.w_s[i % C, C]

    @T.macro
    def outputs(t, held):
        product(t.mix_s, part(t.x_s, held, xs, M), t.y, False, False, False)
        landed(t.y, M * P, 0)

    @T.macro
    def entries(t, one, held):
        product(t.g_s, part(t.x_s, held, xs, M), t.dscore, False, True, True)
        product(t.g_s, part(t.h_s, one, loads.slots, N), t.dn, False, True, True)
        for i, p in T.Parallel(N, P):
            t.E[i, p] = t.E[i, p] * t.w_s[C - 1, C]
        product(t.q_s, t.gw_s[:, :P], t.E, True, False, False)
        product(t.k_s, t.e_s, t.y, False, False, True)

    @T.macro
    def weighted(t):
        landed(t.dscore, M * M, 3)
        for i, j in T.Parallel(M, M):
            if i % C == j % C:
                t.dsame_s[i, j // C] = t.dscore[i, j]
        for i, j in T.Parallel(M, M):
            t.dscore[i, j] = t.dscore[i, j] * t.w_s[i % C, j % C]
        if lent:  # gw_s is in dmix_s
            landed(t.E, N * P, 1)
            T.sync_threads()
        T.copy(t.dscore, t.dmix_s)
        landed(t.dn, M * N, 2)
        for i, j in T.Parallel(M, N):
            t.dn[i, j] = t.dn[i, j] * t.w_s[i % C, C]
        landed(t.E, N * P, 1)

    @T.macro
    def queries(t, held):
        product(t.dmix_s, t.k_s, t.dn, False, False, False)
        product(part(t.x_s, held, xs, M), t.e_s, t.dk, False, True, True)
        landed(t.y, M * P, 2)
        for i, p in T.Parallel(M, P):
            t.y[i, p] = t.y[i, p] * t.w_s[i % C, C + 1]
        landed(t.dn, M * N, 1)

    @T.macro
    def keys(t):
        product(t.mix_s, t.g_s, t.y, True, False, False)
        landed(t.dk, M * N, 1)
        for i, j in T.Parallel(M, N):
            t.dk[i, j] = t.dk[i, j] * t.w_s[i % C, C + 1]
        product(t.dmix_s, t.q_s, t.dk, True, False, False)

    @T.macro
    def finished(t):
        landed(t.y, M * P, 1)
        landed(t.dk, M * N, 0)

    return SimpleNamespace(
        scores=scores, mix=mix, outputs=outputs, entries=entries, weighted=weighted, queries=queries, keys=keys,
        finished=finished,
    )  # fmt: skip


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


def make_rows_in(s: ScanShape) -> Any:
    """Return macro(t, first): sum part_row over its columns into row_s from row `first` on, one per column group."""
    M, groups = s.M, columns_of(s, s.M).groups

    @T.macro
    def rows_in(t, first):
        T.reduce_sum(t.part_row, t.row, dim=2)
        for i, group in T.Parallel(M, groups):
            t.row_s[first + group, i] = t.row[i, group]

    return rows_in


def make_gate(s: ScanShape, loads: Loads, *, lent: bool) -> Any:
    """Return macro(t, n): from y the gradient g with respect to it, that of the gate, and their partial sums.

    Leaves g and g times the decay from the start of the chunk in g_s and gw_s, the gate's in dgate_s, perhaps `lent` by
    k_raw, and <g, y> in row_s from row 2 on. half_zeta_s holds zeta / 2, zeta_s zeta * phi.
    """
    C, M, P = s.C, s.M, s.P
    fold, across, rows_in = fold_of(s), columns_of(s, M).at, make_rows_in(s)

    @T.macro
    def gate(t, n):
        one = loads.slot(n)
        T.clear(t.part_row)
        for i, p in T.Parallel(M, P):
            d32 = f32(t.do_s[one * C + i % C, p] if s.reduced else t.do_s[one * M + i, p])
            z32 = f32(t.z_s[one * C + i % C, p]) if s.gated else 0.0
            half_u = z32 * t.half_zeta_s[i // C, p] if s.gated else 0.0
            bent = scalar.bent(half_u) if s.gated else 0.0
            silu = scalar.silu(half_u, bent) if s.gated else 1.0
            gated = d32 * silu
            if s.reduced:
                t.phi_acc[fold(i), p] += gated * t.y[i, p]
            g32 = gated * t.phi_s[i // C, p] if s.reduced else gated
            if s.gated:
                slope = scalar.silu_slope(silu, bent)
                du = d32 * t.y[i, p] * slope
                t.zeta_acc[fold(i), p] += du * z32
                t.dgate[i, p] = bf16(du * t.zeta_s[i // C, p])
            t.g[i, p] = bf16(g32)
            t.gw[i, p] = bf16(g32 * t.w_s[i % C, C])
        T.copy(t.g, t.g_s)
        T.copy(t.gw, t.gw_s[:, :P])
        # of g as the products take it: else the same step's share would not cancel in the gradients of time
        for i, p in T.Parallel(M, P):
            t.part_row[i, across(p)[0], across(p)[1]] += f32(t.g[i, p]) * t.y[i, p]
        rows_in(t, 2)
        if s.gated:
            put(t.dgate, t.dgate_s, loads, n, lent)

    return gate


def make_values(s: ScanShape, v: Variant, loads: Loads) -> Any:
    """Return macro(t, held): from dx in y the gradient of v per rank in x_s, psi's partial sums, the rows of row_s.

    row_s: 0 the gradient of gamma, 1 the same step's share of <g, y> and of <x, dx>, which comes after <g, y>.
    """
    C, M, P, R, xs = s.C, s.M, s.P, s.R, x_slots(v, loads)
    fold, rows_in, (groups, _, across) = fold_of(s), make_rows_in(s), columns_of(s, M)

    @T.macro
    def values(t, held):
        T.clear(t.part_row)
        for i, p in T.Parallel(M, P):
            v32 = f32(t.v_s[held * C + i % C, p])
            t.psi_acc[fold(i), p] += t.y[i, p] * v32
            dx = scalar.psiv(t.y[i, p], t.psi_s[i // C, p])
            t.g[i, p] = bf16(dx)
            t.part_row[i, across(p)[0], across(p)[1]] += t.y[i, p] * f32(bf16(scalar.psiv(v32, t.psi_s[i // C, p])))
        T.copy(t.g, part(t.x_s, held, xs, M))
        rows_in(t, 2 + groups)
        for i in T.Parallel(M):
            t.row_s[0, i] = pair_sum(t.same_s, t.dsame_s, i, R)
            t.row_s[1, i] = mixed_sum(t.mix_s, t.dsame_s, i, R, C)

    return values


def firsts(own: Any) -> Any:
    """Return the sum of the first elements of shared buffers.

    When the compiler merges buffers it ends a life at the last use in the text: also in a loop whose next turn reads
    the buffer again, and where a product or a copy that still runs does. Buffers that are read before the loop and
    after it keep their memory; the machine code does not read them, if nobody needs the sum.
    """
    return sum(f32(tile[tuple(0 for _ in tile.shape)]) for tile in own)
