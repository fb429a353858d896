"""Parts of the backward walk between loads and stores: PsiV, weights, products, output gate, inverse rotation.

Rows are i = r * C + c. Letters: see shape.py. The walk places its own barriers, so each part states its conditions.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0915, PLR0917

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward.gradients_io import columns_of, fold_of, part, x_slots
from ablate.kernels.mamba3_mimo.cuda.backward.groups import ProductOperands, Products, Sums, WalkStaging, Weights
from ablate.kernels.mamba3_mimo.cuda.pieces import scalar
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import Loads
from ablate.kernels.mamba3_mimo.cuda.pieces.scalar import RotaryPair
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32, mixed_sum, pair_sum, spread
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def make_weigh(s: ScanShape, loads: Loads) -> Any:
    """Return macro(w_s [C,C+8], scalar_s [3 * slots,C], n): the weights of chunk n.

    w[t, u] is the weight of the write of token u in the output of token t. Column C holds the decay from the start of
    the chunk to t, column C + 1 the weight of the write of token t at the end of the chunk.
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


def make_turned_back(s: ScanShape, threads: int, at: Any = lambda _n, row, column: (row, column)) -> Any:
    """Return macro(grad_s, tile_s [M,N], turn, cos, sin, tx, n): undo the rotation of grad_s in place.

    grad_s holds the gradient of the rotated tile_s, bf16. `at(n, row, column)` is the index in grad_s of chunk n. The
    macro adds the gradient of the thread's angles to `turn`.
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
            turn[u * 8 + e] += scalar.moment(
                RotaryPair(f32(lo[e]), f32(hi[e])), RotaryPair(f32(left[e]), f32(right[e]))
            )
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
            if way.all_turn(u) or tx // M + u * way.step < way.turning:
                group(grad_s, tile_s, turn, cos, sin, lo, hi, left, right, n, u, tx // M + u * way.step, tx)

    return turned_back


def make_turn_out(s: ScanShape, threads: int) -> Any:
    """Return macro(turn_s [M,A+4], turn, tx): store the gradients of the thread's angles in shared memory."""
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
            if way.all_turn(u) or tx // M + u * way.step < way.turning:
                group(turn_s, turn, u, tx // M + u * way.step, tx)

    return turn_out


def make_products(
    s: ScanShape, v: Variant, loads: Loads, threads: int,
    staged: WalkStaging, ops: ProductOperands, acc: Products, sums: Sums, *, lent: bool,
) -> Any:  # fmt: skip
    """Return the matrix products of a chunk as macros, some of which start products and some wait for them.

    If every product fills the matrix unit, products run during other work. Otherwise each waits for its end. In order:

    - `scores`(one): q~ k~, and the entering state's part of y [M,P]
    - `mix`(skip): the weighted scores mix_s
    - `outputs`(held): y. Needs: mix_s of every thread
    - `entries`(one, held): E of the previous chunk, the gradients of the scores, the state's part of dq~ in dn and of
      dx in y. Needs: g_s, gw_s, e_s
    - `weighted`(): the weighted gradients of the scores dmix_s; E is complete
    - `queries`(held): dq~ in dn, and the state's part of dk~ in dk. Needs: dmix_s
    - `keys`(): the rest of dx and of dk~
    - `finished`(): dx in y and dk~ in dk are complete

    With `lent` gw_s lies in dmix_s.
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
        # c is complete when at most the last `running` products still run
        if early:
            T.warpgroup_wait(running)
            T.warpgroup_fence_operand(c, num_regs=size // threads)

    @T.macro
    def scores(one):
        product(ops.q_s, ops.k_s, acc.score, False, True, True)
        product(ops.q_s, part(staged.h_s, one, loads.slots, N), acc.y, False, False, True)

    @T.macro
    def mix(skip):
        landed(acc.score, M * M, 1)
        for i, j in T.Parallel(M, M):
            if i % C == j % C:
                sums.same_s[i, j // C] = acc.score[i, j]
        for i, j in T.Parallel(M, M):
            acc.score[i, j] = scalar.weighted(acc.score[i, j], ops.w_s[i % C, j % C], i == j, skip)
        T.copy(acc.score, ops.mix_s)
        landed(acc.y, M * P, 0)
        for i, p in T.Parallel(M, P):
            acc.y[i, p] = acc.y[i, p] * ops.w_s[i % C, C]

    @T.macro
    def outputs(held):
        product(ops.mix_s, part(staged.x_s, held, xs, M), acc.y, False, False, False)
        landed(acc.y, M * P, 0)

    @T.macro
    def entries(one, held):
        product(ops.g_s, part(staged.x_s, held, xs, M), acc.dscore, False, True, True)
        product(ops.g_s, part(staged.h_s, one, loads.slots, N), acc.dn, False, True, True)
        for i, p in T.Parallel(N, P):
            acc.E[i, p] = acc.E[i, p] * ops.w_s[C - 1, C]
        product(ops.q_s, ops.gw_s[:, :P], acc.E, True, False, False)
        product(ops.k_s, ops.e_s, acc.y, False, False, True)

    @T.macro
    def weighted():
        landed(acc.dscore, M * M, 3)
        for i, j in T.Parallel(M, M):
            if i % C == j % C:
                sums.dsame_s[i, j // C] = acc.dscore[i, j]
        for i, j in T.Parallel(M, M):
            acc.dscore[i, j] = acc.dscore[i, j] * ops.w_s[i % C, j % C]
        if lent:  # gw_s is in dmix_s
            landed(acc.E, N * P, 1)
            T.sync_threads()
        T.copy(acc.dscore, ops.dmix_s)
        landed(acc.dn, M * N, 2)
        for i, j in T.Parallel(M, N):
            acc.dn[i, j] = acc.dn[i, j] * ops.w_s[i % C, C]
        landed(acc.E, N * P, 1)

    @T.macro
    def queries(held):
        product(ops.dmix_s, ops.k_s, acc.dn, False, False, False)
        product(part(staged.x_s, held, xs, M), ops.e_s, acc.dk, False, True, True)
        landed(acc.y, M * P, 2)
        for i, p in T.Parallel(M, P):
            acc.y[i, p] = acc.y[i, p] * ops.w_s[i % C, C + 1]
        landed(acc.dn, M * N, 1)

    @T.macro
    def keys():
        product(ops.mix_s, ops.g_s, acc.y, True, False, False)
        landed(acc.dk, M * N, 1)
        for i, j in T.Parallel(M, N):
            acc.dk[i, j] = acc.dk[i, j] * ops.w_s[i % C, C + 1]
        product(ops.dmix_s, ops.q_s, acc.dk, True, False, False)

    @T.macro
    def finished():
        landed(acc.y, M * P, 1)
        landed(acc.dk, M * N, 0)

    return SimpleNamespace(
        scores=scores, mix=mix, outputs=outputs, entries=entries, weighted=weighted, queries=queries, keys=keys,
        finished=finished,
    )  # fmt: skip


@T.macro
def put(tile, staging, loads, n, lent):
    """Round a fragment [M,width] to bf16 into a shared buffer, with `lent` into chunk n's slot of a staging buffer."""
    rows = tile.shape[0]
    if not lent:
        T.copy(tile, staging)
    elif loads.two_d:
        T.copy(tile, part(staging, loads.slot(n), loads.slots, rows))
    else:
        for i, j in T.Parallel(*tile.shape):
            staging[loads.at(n, i, j)] = bf16(tile[i, j])


def lent_sum(tile: Any, loads: Loads, n: Any, c: Any, p: Any, lent: bool) -> Any:
    """Return the sum over ranks of tile[r * C + c, p], with `lent` from chunk n's slot of a staging buffer."""
    ranks, chunk = loads.s.R, loads.s.C
    total = 0.0
    for r in range(ranks):
        total = total + f32(tile[loads.at(n, r * chunk + c, p) if lent else (r * chunk + c, p)])
    return total


def make_rows_in(s: ScanShape, sums: Sums) -> Any:
    """Return macro(first): sum part_row over its columns into row_s from row `first` on, one per column group."""
    M, groups = s.M, columns_of(s, s.M).groups

    @T.macro
    def rows_in(first):
        T.reduce_sum(sums.part_row, sums.row, dim=2)
        for i, group in T.Parallel(M, groups):
            sums.row_s[first + group, i] = sums.row[i, group]

    return rows_in


def make_output_gate(
    s: ScanShape, loads: Loads,
    staged: WalkStaging, weights: Weights, ops: ProductOperands, acc: Products, sums: Sums, *, lent: bool,
) -> Any:  # fmt: skip
    """Return macro(n): compute from y its gradient g, the output gate's gradient, and their partial sums.

    g goes into g_s, g times the decay from the start of the chunk into gw_s, and <g, y> into row_s from row 2 on. The
    output gate's gradient goes into dgate_s, with `lent` in the memory of k_raw.
    """
    C, M, P = s.C, s.M, s.P
    fold, across, rows_in = fold_of(s), columns_of(s, M).at, make_rows_in(s, sums)

    @T.macro
    def output_gate(n):
        one = loads.slot(n)
        T.clear(sums.part_row)
        for i, p in T.Parallel(M, P):
            d32 = f32(staged.do_s[one * C + i % C, p] if s.reduced else staged.do_s[one * M + i, p])
            z32 = f32(staged.z_s[one * C + i % C, p]) if s.gated else 0.0
            half_u = z32 * weights.half_zeta_s[i // C, p] if s.gated else 0.0
            bent = scalar.bent(half_u) if s.gated else 0.0
            through = scalar.through_gate(d32, acc.y[i, p], half_u, bent, wide=s.P > 64)
            gated = through[0] if s.gated else d32
            if s.reduced:
                sums.phi_acc[fold(i), p] += gated * acc.y[i, p]
            g32 = gated * weights.phi_s[i // C, p] if s.reduced else gated
            if s.gated:
                du = through[1]
                sums.zeta_acc[fold(i), p] += du * z32
                acc.dgate[i, p] = bf16(du * weights.zeta_s[i // C, p])
            acc.g[i, p] = bf16(g32)
            acc.gw[i, p] = bf16(g32 * ops.w_s[i % C, C])
        T.copy(acc.g, ops.g_s)
        T.copy(acc.gw, ops.gw_s[:, :P])
        # uses the rounded g of the products: otherwise the same token's share would not cancel in the time gradients
        for i, p in T.Parallel(M, P):
            sums.part_row[i, across(p)[0], across(p)[1]] += f32(acc.g[i, p]) * acc.y[i, p]
        rows_in(2)
        if s.gated:
            put(acc.dgate, ops.dgate_s, loads, n, lent)

    return output_gate


def make_values(
    s: ScanShape, v: Variant, loads: Loads,
    staged: WalkStaging, weights: Weights, ops: ProductOperands, acc: Products, sums: Sums,
) -> Any:  # fmt: skip
    """Return macro(held): compute from dx in y the gradient of v per rank in x_s, psi's partial sums, and row_s.

    row_s: row 0 is the gradient of gamma, row 1 the same token's share of <g, y> and of <x, dx>. <x, dx> follows
    behind <g, y>.
    """
    C, M, P, R, xs = s.C, s.M, s.P, s.R, x_slots(v, loads)
    fold, rows_in, (groups, _, across) = fold_of(s), make_rows_in(s, sums), columns_of(s, M)

    @T.macro
    def values(held):
        T.clear(sums.part_row)
        for i, p in T.Parallel(M, P):
            v32 = f32(staged.v_s[held * C + i % C, p])
            sums.psi_acc[fold(i), p] += acc.y[i, p] * v32
            dx = scalar.psiv(acc.y[i, p], weights.psi_s[i // C, p])
            acc.g[i, p] = bf16(dx)
            sums.part_row[i, across(p)[0], across(p)[1]] += acc.y[i, p] * f32(
                bf16(scalar.psiv(v32, weights.psi_s[i // C, p]))
            )
        T.copy(acc.g, part(staged.x_s, held, xs, M))
        rows_in(2 + groups)
        for i in T.Parallel(M):
            sums.row_s[0, i] = pair_sum(sums.same_s, sums.dsame_s, i, R)
            sums.row_s[1, i] = mixed_sum(ops.mix_s, sums.dsame_s, i, R, C)

    return values


def firsts(own: Any) -> Any:
    """Return the sum of the first elements of shared buffers, which keeps them alive.

    A compiler that merges buffers ends a lifetime at the last use in the text, even if the next turn of the loop, or a
    running product or copy, still reads the buffer. A buffer that is read before and after the loop keeps its memory.
    The machine code contains no such reads if the sum is unused.
    """
    return sum(f32(tile[tuple(0 for _ in tile.shape)]) for tile in own)
