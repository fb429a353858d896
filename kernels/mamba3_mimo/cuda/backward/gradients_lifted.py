"""B3 in the form of lifted.py: six barriers a chunk, where the form of gradients.py has thirteen."""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey
from tilelang.layout import make_swizzled_layout

from kernels.mamba3_mimo.cuda.backward import lifted
from kernels.mamba3_mimo.cuda.backward.lifted import Operand
from kernels.mamba3_mimo.cuda.host.machine import GROUP, LINE, SWIZZLE_128
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces import scalar, tiles
from kernels.mamba3_mimo.cuda.pieces.loads import Loads, by_rank, make_loads, make_store, panels, ranks_of
from kernels.mamba3_mimo.cuda.pieces.matrices import column, kept, put, put_turned, row, scatter_sums, take_turned
from kernels.mamba3_mimo.cuda.pieces.products import end_batch
from kernels.mamba3_mimo.cuda.pieces.tensors import takes, writes_first
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, UNPACKED, bf16, f32


def make_start(s: ScanShape, v: Variant, loads: Loads, given: Any, staged: Any) -> Any:
    """Return macro(b, h, t0, n, tx): start every copy of chunk n, which begins at token t0; four warps share them."""
    C, N, P, depth = s.C, s.N, s.P, s.A // 4

    @T.macro
    def outputs(b, h, t0, n):
        one = loads.slot(n)
        loads.copy(given.states[b, h, t0 // C, :, :], staged.h_s[one * N : (one + 1) * N, :], staged.bar, n)
        if s.gated:
            loads.copy(given.z[b, t0 : t0 + C, h, :], staged.z_s[one * C : (one + 1) * C, :], staged.bar, n)
        if s.reduced:
            loads.copy(given.do[b, t0 : t0 + C, h, :], staged.do_s[one * C : (one + 1) * C, :], staged.bar, n)
        else:
            loads.ranks_in(staged.do_s, given.do, [slice(0, P)], staged.bar, b, h, t0, n)

    @T.macro
    def inputs(b, h, t0, n):
        held = loads.held_slot(n)
        loads.copy(given.v[b, t0 : t0 + C, h, :], staged.v_s[held * C : (held + 1) * C, :], staged.bar, n)
        turns = slice(held * depth, (held + 1) * depth)
        loads.copy(given.cs[b, h, t0 // C, :, :, :], staged.cs_s[turns, :, :], staged.bar, n)
        loads.copy(given.lc[b, h, t0 : t0 + C], staged.scalar_s[held * 3, :], staged.bar, n)
        loads.copy(given.sk[b, h, t0 : t0 + C], staged.scalar_s[held * 3 + 1, :], staged.bar, n)
        loads.copy(given.gm[b, h, t0 : t0 + C], staged.scalar_s[held * 3 + 2, :], staged.bar, n)

    @T.macro
    def start(b, h, t0, n, tx):
        if v.tma:
            # the compiler elects a thread of every range of threads that it can tell apart
            if tx < 64:
                if tx < 32:
                    loads.rows(staged.q_raw, given.q, staged.bar, b, h, t0, n)
                else:
                    loads.rows(staged.k_raw, given.k, staged.bar, b, h, t0, n)
            else:
                if tx < 96:
                    outputs(b, h, t0, n)
                else:
                    inputs(b, h, t0, n)
        else:
            loads.rows(staged.q_raw, given.q, staged.bar, b, h, t0, n)
            loads.rows(staged.k_raw, given.k, staged.bar, b, h, t0, n)
            outputs(b, h, t0, n)
            inputs(b, h, t0, n)
        loads.posted(staged.bar, n)

    return start


def copies_of(s: ScanShape, loads: Loads) -> int:
    """Return how many copies load one chunk."""
    return 2 * len(loads.columns()) + 7 + s.gated


def gradients(s: ScanShape, v: Variant) -> Any:
    """B3 of `gradients.gradients`, which says what it takes and writes."""
    B, H, N, P, R, A, C, M, L = s.B, s.H, s.N, s.P, s.R, s.A, s.C, s.M, s.L
    groups = lifted.groups_of(s)
    threads, loads, depth = groups * GROUP, make_loads(s, v), A // 4
    # of a thread, in the columns that its group has of [64,64]: blocks of 8, numbers, blocks of one rank
    blocks, held_l, parts, alone = 8 // groups, 32 // groups, C // 8 // groups, groups == 1
    order = tiles.Order(lambda group: lifted.panel_column(s, group), 32)
    way, angles = tiles.spread(s, threads), tiles.make_angles(s, threads)
    turned, product = tiles.make_rotated_shared(s, threads, loads.at, order), lifted.make_product(s)
    scales, scores = lifted.make_scales(s), lifted.make_scores(s)
    spread, gate, values = lifted.make_gate(s)
    turned_back, (edge, edge_out) = lifted.make_turned_back(s), lifted.make_edge(s)
    store, stored = make_store(v)

    @T.prim_func
    @takes(s, v, d_out="do")
    def b3_gradients(
        q, k, v_, z, d_out, q_bias, k_bias, psi, zeta, phi, D, cs, lc, sk, gm, states, leaving, psiv,
        dqh, dkh, dv, dz, dtheta, row_q, row_k, same, diag, p_psi, p_zeta, p_phi, p_d, edges, first,
    ):  # fmt: skip
        with T.Kernel(H, B, threads=threads) as (h, b):
            T.assume(b < s.most_walks)  # so offsets have 32 bits where these do
            T.annotate_pass_configs({PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True})
            T.import_source(UNPACKED)
            q_raw, k_raw, bar = loads.tile(), loads.tile(), loads.barriers(threads)
            q_s, k_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            x_s, g_s, mix_s, dmix_s = (T.alloc_shared((64, 64), BF16) for _ in range(4))
            e_s = T.alloc_shared((P, N), BF16)
            # two groups: no group has all columns of a left operand, or of rows that lie apart
            gw_s, mixt_s = (None, None) if alone else (T.alloc_shared((64, 64), BF16) for _ in range(2))
            dq_s, dk_s = (g_s, x_s) if alone else (T.alloc_shared((M, N), BF16) for _ in range(2))
            h_s = T.alloc_shared((loads.slots * N, P), BF16)
            v_s = T.alloc_shared((loads.held * C, P), BF16)
            z_s = T.alloc_shared((loads.slots * C, P), BF16)
            do_s = T.alloc_shared((loads.slots * (C if s.reduced else M), P), BF16)
            cs_s = T.alloc_shared((loads.held * depth, C, 8), F16)
            scalar_s = T.alloc_shared((loads.held * 3, C), F32)
            turn_s = T.alloc_shared((M, A + 8), F32)
            row_s, sum_s = T.alloc_shared((2, M), F32), T.alloc_shared((4, 2, C), F32)
            line_s, total_s = T.alloc_shared((4, 2, N), F32), T.alloc_shared((4 * groups,), F32)
            qb_s, kb_s = T.alloc_shared((1, R, N), BF16), T.alloc_shared((1, R, N), BF16)
            psi_s, half_zeta_s, zeta_s, phi_s = (T.alloc_shared((P, R), F32) for _ in range(4))
            cos, sin = (T.alloc_local((way.angles,), F16) for _ in range(2))
            E, dn, dk = (T.alloc_local((32,), F32) for _ in range(3))
            y, dx = (T.alloc_local((held_l,), F32) for _ in range(2))
            score = dk if alone else T.alloc_local((held_l,), F32)
            wide, left, g, gw = (T.alloc_local((size,), BF16) for size in (32, held_l, held_l, held_l))
            v_l, z_l, out_l = (T.alloc_local((parts * 4,), BF16) for _ in range(3))
            do_l, ranks_l = T.alloc_local((parts * 4 if s.reduced else held_l,), BF16), T.alloc_local((parts * 4,), F32)
            w, scale = T.alloc_local((parts * 4,), F32), T.alloc_local((parts * 2,), F32)
            rows, turn = T.alloc_local((parts * 4,), F32), T.alloc_local((4 * lifted.angle_blocks(s),), F32)
            own, d_own = (T.alloc_local((2 // groups * R,), F32) for _ in range(2))
            ends = T.alloc_local((2,), F32)
            psi_acc, zeta_acc, phi_acc = (T.alloc_local((2 * R,), F32) for _ in range(3))
            d_sum, skip = T.alloc_local((1,), F32), T.alloc_local((1,), F32)
            tiles_s = [q_s, k_s, x_s, g_s, e_s, mix_s, dmix_s, h_s, *(() if alone else (gw_s, mixt_s))]
            natural = [T.alloc_wgmma_desc() for _ in tiles_s]
            apart = natural if alone else [T.alloc_wgmma_desc() for _ in tiles_s]
            q_d, k_d, x_d, g_d, e_d, mix_d, dmix_d, _, gw_d, _ = (*natural, None, None)[:10]
            q_o, k_o, x_o, _, _, mix_o, _, h_o, _, mixt_o = (*apart, None, None)[:10]
            swizzled = (q_raw, k_raw) if loads.two_d else ()
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (*swizzled, *tiles_s, dq_s, dk_s, v_s, z_s, do_s)})
            given = SimpleNamespace(q=q, k=k, v=v_, z=z, do=d_out, cs=cs, lc=lc, sk=sk, gm=gm, states=states)
            staged = SimpleNamespace(
                q_raw=q_raw, k_raw=k_raw, v_s=v_s, z_s=z_s, do_s=do_s, cs_s=cs_s, scalar_s=scalar_s, h_s=h_s, bar=bar
            )
            weights = SimpleNamespace(half_zeta_s=half_zeta_s, zeta_s=zeta_s, phi_s=phi_s)
            sums = SimpleNamespace(psi_acc=psi_acc, zeta_acc=zeta_acc, phi_acc=phi_acc)
            start = make_start(s, v, loads, given, staged)
            tx = T.get_thread_binding()
            nc = L // C
            last = (nc - 1) * C
            for n in range(loads.ahead):
                if n < nc:
                    start(b, h, last - n * C, n, tx)
            T.copy(q_bias[h : h + 1, :, :], qb_s, disable_tma=True)
            T.copy(k_bias[h : h + 1, :, :], kb_s, disable_tma=True)
            for p, r in T.Parallel(P, R):
                psi_s[p, r] = psi[h, r, p]
                if s.gated:
                    half_zeta_s[p, r] = 0.5 * zeta[h, r, p]
                    zeta_s[p, r] = zeta[h, r, p] * (phi[h, r, p] if s.reduced else 1.0)
                if s.reduced:
                    phi_s[p, r] = phi[h, r, p]
            for lower in (0, 1):
                for block in T.unroll(8):
                    for e in T.unroll(2):
                        E[block * 4 + lower * 2 + e] = leaving[b, h, column(tx, block, groups) + e, row(tx, lower)]
            skip[0] = D[h]
            d_sum[0] = 0.0
            for c in T.unroll(2 * R):
                psi_acc[c] = 0.0
                zeta_acc[c] = 0.0
                phi_acc[c] = 0.0
            for tile, desc, other in tuple(zip(tiles_s, natural, apart, strict=True)):
                T.initialize_wgmma_descriptor(desc, tile.access_ptr("r"), SWIZZLE_128, 1, 8 * LINE >> 4)
                if not alone:
                    T.initialize_wgmma_descriptor(other, tile.access_ptr("r"), SWIZZLE_128, 1, 8 * groups * LINE >> 4)
            group = 0 if alone else T.shfl_sync(tx // GROUP, 0)  # the compiler sees that a warp agrees
            own_rows, panel = group * (8 * LINE >> 4), group * (64 * LINE >> 4)
            by_rows = SimpleNamespace(
                q=Operand(q_o, True, own_rows), k=Operand(k_o, True, own_rows), x=Operand(x_o, True, own_rows),
                mix=Operand(mix_o, True, own_rows),
                mixt=Operand(mix_d, False) if alone else Operand(mixt_o, True, own_rows),
            )  # fmt: skip
            by_states = SimpleNamespace(
                q=Operand(q_d, False, panel), k=Operand(k_d, False, panel), e=Operand(e_d, False, panel)
            )
            T.sync_threads()
            for n in T.serial(nc):
                t0 = last - n * C
                held, one = loads.held_slot(n), loads.slot(n)
                if loads.ahead == 0:
                    start(b, h, t0, n, tx)
                for c in T.unroll(16):
                    for e in T.vectorized(2):
                        wide[c * 2 + e] = bf16(E[c * 2 + e])
                loads.wait(bar, n, nc, copies_of(s, loads))
                angles(cos, sin, cs_s, held * depth, tx)
                turned(k_s, k_raw, kb_s, cos, sin, tx, n)
                turned(q_s, q_raw, qb_s, cos, sin, tx, n)
                take_turned(v_l, v_s, held * C, parts, groups, tx)
                if s.gated:
                    take_turned(z_l, z_s, one * C, parts, groups, tx)
                take_turned(do_l, do_s, one * (C if s.reduced else M), parts if s.reduced else blocks, groups, tx)
                stored()  # what the chunk before wrote: dq from g_s, dk from x_s, dv from v_s
                T.fence_proxy_async()
                T.sync_threads()
                entering = one * (N * LINE >> 4)
                product(score, Operand(q_d, True), by_rows.k, 64 // groups, N, True)
                product(y, Operand(h_o, False, entering, spread=groups), by_rows.q, 64 // groups, N, True)
                put(e_s, wide, 8, groups, tx, panel=64)
                spread(gw, v_l, psi_s, tx)
                put_turned(x_s, 0, gw, blocks, groups, tx)
                scales.pairs(w, scalar_s, held * 3, tx)
                scales.reads(scale, scalar_s, held * 3, tx)
                end_batch(1, score)
                scores.own(own, score, tx)
                scores.weighted(g, score, w, skip[0], tx)
                put(mix_s, g, blocks, groups, tx)
                if not alone:
                    put_turned(mixt_s, 0, g, blocks, groups, tx)
                end_batch(0, y)
                for block in T.unroll(blocks):
                    for lower in (0, 1):
                        for e in T.unroll(2):
                            y[block * 4 + lower * 2 + e] *= scale[block % parts * 2 + e]
                T.fence_proxy_async()
                T.sync_threads()
                product(y, gw if alone else Operand(x_d, False), by_rows.mix, 64 // groups, M, False)
                if not alone:
                    product(dx, Operand(e_d, True), by_rows.k, 64 // groups, N, True)
                end_batch(0 if alone else 1, y, gw)
                gate(y, g, gw, ranks_l, rows, z_l, do_l, scale, weights, sums, tx)
                put(g_s, g, blocks, groups, tx)
                if not alone:
                    put(gw_s, gw, blocks, groups, tx)
                if s.gated:
                    for c in T.unroll(parts * 2):
                        for e in T.vectorized(2):
                            out_l[c * 2 + e] = bf16(ranks_l[c * 2 + e])
                    put_turned(z_s, one * C, out_l, parts, groups, tx)
                T.fence_proxy_async()
                T.sync_threads()
                if alone:  # else it runs since the gate began: there are registers for it
                    product(dx, Operand(e_d, True), by_rows.k, 64 // groups, N, True)
                product(score, Operand(g_d, False), by_rows.x, 64 // groups, P, True)
                ends[0] = scalar.read_scale(scalar_s[held * 3, C - 1])
                for c in T.unroll(32):
                    E[c] *= ends[0]
                product(E, gw if alone else Operand(gw_d, True), by_states.q, 64, M, False)
                if s.gated:
                    store(z_s[one * C : (one + 1) * C, :], dz[b, t0 : t0 + C, h, :])
                scales.writes(scale, scalar_s, held * 3, tx)
                end_batch(2, dx)
                for block in T.unroll(blocks):
                    for lower in (0, 1):
                        for e in T.unroll(2):
                            dx[block * 4 + lower * 2 + e] *= scale[block % parts * 2 + e]
                product(dx, Operand(g_d, True), by_rows.mixt, 64 // groups, M, False)
                end_batch(2, score)
                scores.own(d_own, score, tx)
                scores.weighed(left, score, w)
                if not alone:
                    product(dn, Operand(g_d, False), Operand(h_o, True, entering + own_rows), 64, P, True)
                for lower in tuple(range(2 // groups)):
                    line = lifted.own_row(s, tx, lower)
                    ends[0] = 0.0
                    ends[1] = 0.0
                    for r in tuple(range(R)):
                        ends[0] += own[lower * R + r] * d_own[lower * R + r]
                        ends[1] += d_own[lower * R + r] * f32(
                            bf16(
                                scalar.weighted(
                                    own[lower * R + r], scalar_s[held * 3 + 2, line % C], line // C == r, skip[0]
                                )
                            )
                        )
                        d_sum[0] += T.if_then_else((line // C == r) & lifted.owns(tx), d_own[lower * R + r], 0.0)
                    if lifted.owns(tx):
                        row_s[0, line] = ends[0]
                        row_s[1, line] = ends[1]
                put(dmix_s, left, blocks, groups, tx)
                if alone:
                    product(dn, Operand(g_d, False), Operand(h_o, True, entering + own_rows), 64, P, True)
                end_batch(0, dn, E, gw, dx)
                for lower in (0, 1):
                    ends[lower] = scales.read_of(scalar_s, held * 3, tx, lower)
                    for block in T.unroll(8):
                        for e in T.unroll(2):
                            dn[block * 4 + lower * 2 + e] *= ends[lower]
                edge(E, h_s, one * N, line_s, t0, tx)
                if loads.ahead > 0:
                    stored()  # dz
                T.fence_proxy_async()
                T.sync_threads()
                product(dn, left if alone else Operand(dmix_d, True), by_states.k, 64, M, False)
                product(dk, Operand(x_d, True), by_states.e, 64, P, True)
                if loads.ahead > 0 and n + loads.ahead < nc:
                    later = t0 - loads.ahead * C
                    start(b, h, later, n + loads.ahead, tx)
                edge_out(line_s, edges, b, h, t0, tx)
                for c in T.unroll(4 * lifted.angle_blocks(s)):
                    turn[c] = 0.0
                end_batch(1, dn, left)
                turned_back(dn, q_s, turn, cs_s, held * depth, tx)
                for c in T.unroll(16):
                    for e in T.vectorized(2):
                        wide[c * 2 + e] = bf16(dn[c * 2 + e])
                put(dq_s, wide, 8, groups, tx)
                end_batch(0, dk)
                for lower in (0, 1):
                    ends[lower] = scales.write_of(scalar_s, held * 3, tx, lower)
                    for block in T.unroll(8):
                        for e in T.unroll(2):
                            dk[block * 4 + lower * 2 + e] *= ends[lower]
                product(dk, Operand(dmix_d, False), by_states.q, 64, M, False)
                values(dx, ranks_l, rows, v_l, psi_s, sums, tx)
                for c in T.unroll(parts * 2):
                    for e in T.vectorized(2):
                        out_l[c * 2 + e] = bf16(ranks_l[c * 2 + e])
                put_turned(v_s, held * C, out_l, parts, groups, tx)
                scatter_sums(rows, parts * 4, tx)
                for c in T.unroll(max(1, parts // 2)):
                    at = kept(parts * 4, tx) + c
                    kind, here = at // (parts * 2), at % (parts * 2)
                    sum_s[tx % GROUP // 32, kind, column(tx, here // 2, groups) + here % 2] = rows[c]
                T.fence_proxy_async()
                T.sync_threads()
                for cols in panels(N):
                    store(ranks_of(dq_s, C)[:, :, cols], by_rank(dqh)[b, :, t0 : t0 + C, h, cols])
                store(v_s[held * C : (held + 1) * C, :], dv[b, t0 : t0 + C, h, :])
                end_batch(0, dk)
                turned_back(dk, k_s, turn, cs_s, held * depth, tx)
                for c in T.unroll(16):
                    for e in T.vectorized(2):
                        wide[c * 2 + e] = bf16(dk[c * 2 + e])
                put(dk_s, wide, 8, groups, tx)
                for lower in (0, 1):
                    for block in T.unroll(lifted.angle_blocks(s)):
                        for e in T.vectorized(2):
                            turn_s[row(tx, lower), column(tx, block, groups) + e] = turn[
                                (lower * lifted.angle_blocks(s) + block) * 2 + e
                            ]
                for c in T.Parallel(C):
                    same[b, h, t0 + c] = tiles.row_sum(row_s, 0, c, R, C)
                    diag[b, h, t0 + c] = tiles.row_sum(row_s, 1, c, R, C)
                    row_q[b, h, t0 + c] = sum_s[0, 0, c] + sum_s[1, 0, c] + sum_s[2, 0, c] + sum_s[3, 0, c]
                    row_k[b, h, t0 + c] = sum_s[0, 1, c] + sum_s[1, 1, c] + sum_s[2, 1, c] + sum_s[3, 1, c]
                T.fence_proxy_async()
                T.sync_threads()
                for cols in panels(N):
                    store(ranks_of(dk_s, C)[:, :, cols], by_rank(dkh)[b, :, t0 : t0 + C, h, cols])
                for c, j in T.Parallel(C, A):
                    dtheta[b, h, t0 + c, j] = tiles.rank_sum(turn_s, c, j, R, C)
                if loads.ahead == 0:
                    stored()
                    T.sync_threads()
            stored()
            if writes_first(s, v):
                for lower in (0, 1):
                    for block in T.unroll(8):
                        for e in T.unroll(2):
                            first[b, h, column(tx, block, groups) + e, row(tx, lower)] = E[block * 4 + lower * 2 + e]
            for lower in (0, 1):
                for r in T.unroll(R):
                    for lanes in (1, 2):
                        psi_acc[r * 2 + lower] += T.shfl_xor(psi_acc[r * 2 + lower], lanes)
                        zeta_acc[r * 2 + lower] += T.shfl_xor(zeta_acc[r * 2 + lower], lanes)
                        phi_acc[r * 2 + lower] += T.shfl_xor(phi_acc[r * 2 + lower], lanes)
                    # one partial sum for every 8 rows is wanted: here one lane has all of a rank
                    if tx % 4 < parts:
                        line, p = r * (C // 8) + column(tx, tx % 4, groups) // 8, row(tx, lower)
                        p_psi[b, h, line, p] = T.if_then_else(tx % 4 == 0, psi_acc[r * 2 + lower], 0.0)
                        if s.gated:
                            p_zeta[b, h, line, p] = T.if_then_else(tx % 4 == 0, zeta_acc[r * 2 + lower], 0.0)
                        if s.reduced:
                            p_phi[b, h, line, p] = T.if_then_else(tx % 4 == 0, phi_acc[r * 2 + lower], 0.0)
            for lanes in (16, 8, 4, 2, 1):
                d_sum[0] += T.shfl_xor(d_sum[0], lanes)
            if tx % 32 == 0:
                total_s[tx // 32] = d_sum[0]
            T.sync_threads()
            if tx == 0:
                p_d[b, h] = reduce(add, (total_s[warp] for warp in range(4 * groups)))

    return b3_gradients
