"""Forward kernels F1 to F3: local states of super-chunks, state passing, outputs.

Rows of one chunk's tiles are in (rank, time) order, i = r * C + c, so the weight of a pair of rows depends only on
i % C and j % C. Letters: see shape.py. Scalars per token come from prefix.py: `lc` in-chunk cumulated log2 decay, `sk`
write scale gamma + sigma, `gm` gamma, `wk` weight of a write at the end of its super-chunk.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from ablate.kernels.mamba3_mimo.cuda.forward import outputs_lifted
from ablate.kernels.mamba3_mimo.cuda.forward.lifted import lifts
from ablate.kernels.mamba3_mimo.cuda.pieces import scalar, tiles, walk
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import make_loads
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import swizzled_lines
from ablate.kernels.mamba3_mimo.cuda.pieces.outer import Registers, make_outer
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, UNPACKED, bf16, f32
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def local_states(s: ScanShape, v: Variant) -> Any:
    """F1: local[b,h] = sum over the super-chunk of wk * k~ (x) x, fp32 [B,H,N,P].

    Computes the first `taken` of the `super_chunks` of a row.
    """
    B, H, N, P, R, A, C, M, L = s.B, s.H, s.N, s.P, s.R, s.A, s.C, s.M, s.L
    loads, threads = walk.make_early_loads(s, v), walk.threads_for(s)
    blocks = 5 if (N, P, C, M) == (64, 64, 16, 64) else 0  # measured
    outer = make_outer(s, threads, loads)
    piece, factor, expanded = tiles.make_piece(s, threads), tiles.make_factor(s), tiles.make_expanded(s, threads)
    row_scales, part = tiles.make_row_scales(s, threads), tiles.pieces(s, threads)

    @T.macro
    def start(k_raw, v_s, cs_s, k, v_in, cs, full, b, h, n):
        t0, slot = n * C, loads.slot(n)
        loads.rows(k_raw, k, full, b, h, t0, n)
        loads.copy(v_in[b, t0 : t0 + C, h, :], v_s[slot * C : (slot + 1) * C, :], full, n)
        loads.copy(cs[b, h, t0 // C, :, :, :], cs_s[slot * (A // 4) : (slot + 1) * (A // 4), :, :], full, n)
        loads.posted(full, n)

    @T.macro
    def write(v_l, v_s, scale, psi_l, x_s, wk_s, n, tx):
        piece(v_l, v_s, loads.slot(n) * C, tx)
        row_scales(scale, wk_s, n * C, tx)
        expanded(x_s, v_l, scale, psi_l, tx, n % outer.slots * M)

    begin, total = walk.make_sum(s, v, loads, outer, start, write, copies=len(loads.columns()) + 2)

    @T.prim_func
    @takes(s, v)
    def f1_local_states(k, v, k_bias, psi, cs, wk, local, super_chunks: T.int32, taken: T.int32):
        with T.Kernel(H, taken, B // super_chunks, threads=threads) as (h, i, row):
            b = row * super_chunks + i
            T.assume((b >= 0) & (b < B) & (b < s.most_walks))  # otherwise the compiler sees no contiguous copy of cs
            T.import_source(UNPACKED)
            if blocks:
                T.annotate_min_blocks_per_sm(blocks)
            T.annotate_pass_configs({PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True})
            k_raw = loads.tile()
            v_s = T.alloc_shared((loads.slots * C, P), BF16)
            cs_s = T.alloc_shared((loads.slots * (A // 4), C, 8), F16)
            x_s = T.alloc_shared((outer.slots * M, P), BF16)
            wk_s = T.alloc_shared((L,), F32)
            acc, left, held = outer.registers()
            psi_l = T.alloc_local((4 * R,), F32)
            v_l, scale = T.alloc_local((part.units * 4,), BF16), T.alloc_local((part.units,), F32)
            desc = T.alloc_wgmma_desc()
            full = loads.barriers(threads)
            T.annotate_layout({**loads.layouts(k_raw), **outer.layouts(x_s)})
            given, mine = (k_raw, v_s, cs_s, k, v, cs, full), Registers(acc, left, held, desc)
            tx = T.get_thread_binding()
            begin(given, mine, x_s, k_bias, b, h, tx)
            factor(psi_l, psi, h, tx)
            total(given, (v_l, v_s, scale, psi_l), mine, k_raw, cs_s, x_s, wk_s, wk, local, full, b, h, tx)

    return f1_local_states


def pass_states(s: ScanShape, *, reverse: bool) -> Any:
    """F2: replace every local state by its super-chunk's entering state; `final` is the state after the last.

    Works in place on local [B,K,H,N,P] fp32. carry [B,K,H] fp32 is the decay of a whole super-chunk. With `reverse` the
    walk goes from the last super-chunk to the first. The next `ahead` super-chunks are loaded during the additions.
    """
    B, H, N, P, K, threads = s.B, s.H, s.N, s.P, s.K, 128
    wide = 4 if N * P % (4 * threads) == 0 else 2
    ahead, per_block = 8, threads * wide
    rounds = (K + ahead - 1) // ahead

    @T.macro
    def fetch(entry, decay, local, carry, b, h, at, group):
        for u in T.unroll(ahead):
            near = T.min(group * ahead + u, K - 1)
            for e in T.vectorized(wide):
                entry[u * wide + e] = local[b, K - 1 - near if reverse else near, h, at + e]
            decay[u] = carry[b, K - 1 - near if reverse else near, h]

    @T.macro
    def passed(state, entry, decay, local, b, h, at, group):
        for u in T.unroll(ahead):
            if group * ahead + u < K:
                sc = K - 1 - (group * ahead + u) if reverse else group * ahead + u
                for e in T.vectorized(wide):
                    local[b, sc, h, at + e] = state[e]
                for e in T.vectorized(wide):
                    state[e] = state[e] * decay[u] + entry[u * wide + e]

    @T.prim_func
    def f2_pass_states(
        local: T.Tensor((B, K, H, N * P), F32),
        carry: T.Tensor((B, K, H), F32),
        final: T.Tensor((B, H, N * P), F32),
    ):
        with T.Kernel(N * P // per_block, H, B, threads=threads) as (bx, h, b):
            state = T.alloc_local((wide,), F32)
            entry, later = T.alloc_local((ahead * wide,), F32), T.alloc_local((ahead * wide,), F32)
            decay, decay_later = T.alloc_local((ahead,), F32), T.alloc_local((ahead,), F32)
            at = bx * per_block + T.get_thread_binding() * wide
            for e in T.vectorized(wide):
                state[e] = 0.0
            fetch(entry, decay, local, carry, b, h, at, 0)
            for pair in T.serial((rounds + 1) // 2):
                fetch(later, decay_later, local, carry, b, h, at, pair * 2 + 1)
                passed(state, entry, decay, local, b, h, at, pair * 2)
                fetch(entry, decay, local, carry, b, h, at, pair * 2 + 2)
                passed(state, later, decay_later, local, b, h, at, pair * 2 + 1)
            for e in T.vectorized(wide):
                final[b, h, at + e] = state[e]

    return f2_pass_states


def outputs(s: ScanShape, v: Variant) -> Any:
    """F3: o bf16 from the states `entering` fp32 [B,H,N,P] of the walks.

    o is [B,S,H,P], or [B,S,R,H,P] without phi. F3 also writes the entering state of every chunk, bf16 [B,H,S/C,N,P],
    with `psiv_cache` PsiV, bf16 [B,H,S/C,M,P], and in the sequential schedule the state after the last chunk, `final`
    fp32 [B,H,N,P]. `enters` is 0 if no state enters. Then `entering` is not read.
    """
    if lifts(s):
        return outputs_lifted.outputs(s, v)
    B, H, N, P, R, A, C, M, L = s.B, s.H, s.N, s.P, s.R, s.A, s.C, s.M, s.L
    loads, threads, W = make_loads(s, v), walk.threads_for(s), tiles.window(s)
    ahead = loads.ahead
    angles, rotated = tiles.make_angles(s, threads), tiles.make_rotated_shared(s, threads, loads.at)
    piece, factor, expanded = tiles.make_piece(s, threads), tiles.make_factor(s), tiles.make_expanded(s, threads)
    row_scales = tiles.make_row_scales(s, threads)
    fill, weights = tiles.make_window(s), tiles.make_weights(s)
    way, part = tiles.spread(s, threads), tiles.pieces(s, threads)
    start, copies = walk.make_output_start(s, loads)
    paired, own_rows, stored = M % 64 == 0 and N % 64 == 0, threads // 2 == M, not v.tma
    by_rows = T.GemmWarpPolicy.FullRow if own_rows else T.GemmWarpPolicy.Square
    psiv_cache, sequential = v.psiv_cache, v.schedule == "sequential"

    @T.prim_func
    @takes(s, v)
    def f3_outputs(q, k, v, z, q_bias, k_bias, psi, zeta, phi, D, cs, lc, sk, gm, entering, o, states, psiv, final,
                   enters: T.int32):  # fmt: skip
        with T.Kernel(H, B, threads=threads) as (h, b):
            T.assume(b < s.most_walks)  # allows 32-bit offsets if the walks do
            if N * P <= 64 * 64 and M == 64 and ahead <= 1:
                T.annotate_min_blocks_per_sm(3)
            q_raw, k_raw = loads.tile(), loads.tile()
            v_s = T.alloc_shared((loads.slots * C, P), BF16)
            z_s = walk.staged(s.gated, (loads.held * C, P), BF16)
            cs_s = T.alloc_shared((loads.slots * (A // 4), C, 8), F16)
            q_s, k_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            x_s, xw_s = T.alloc_shared((M, P), BF16), T.alloc_shared((M, P), BF16)
            h_s = T.alloc_shared((N, P), BF16)
            mix_s = None if own_rows else T.alloc_shared((M, M), BF16)
            w_s = T.alloc_shared((C, C + 8), F32)
            qb_s, kb_s = T.alloc_shared((1, R, N), BF16), T.alloc_shared((1, R, N), BF16)
            zeta_s = walk.staged(s.gated, (R, P), F32)
            phi_s = walk.staged(s.reduced, (R, P), F32)
            lc_s, sk_s, gm_s, read_s, write_s = (T.alloc_shared((W,), F32) for _ in range(5))
            psi_l, skip = T.alloc_local((4 * R,), F32), T.alloc_local((1,), F32)
            cos, sin = (T.alloc_local((way.angles,), F16) for _ in range(2))
            v_l = T.alloc_local((part.units * 4,), BF16)
            one, scale = (T.alloc_local((part.units,), F32) for _ in range(2))
            state, y = T.alloc_fragment((N, P), F32), T.alloc_fragment((M, P), F32)
            score, mixed = T.alloc_fragment((M, M), F32), T.alloc_fragment((M, M), BF16)
            full = loads.barriers(threads)
            T.annotate_layout(loads.layouts(q_raw, k_raw))
            if s.gated:
                T.annotate_layout({z_s: swizzled_lines(z_s)})
            tx = T.get_thread_binding()
            nc, given = L // C, (q_raw, k_raw, v_s, z_s, cs_s, q, k, v, z, cs, full)
            for n in tuple(range(min(ahead, nc))):
                start(*given, b, h, n)
            T.copy(q_bias[h : h + 1, :, :], qb_s, disable_tma=True)
            T.copy(k_bias[h : h + 1, :, :], kb_s, disable_tma=True)
            for r, p in T.Parallel(R, P):
                if s.gated:
                    zeta_s[r, p] = 0.5 * zeta[h, r, p]
                if s.reduced:
                    phi_s[r, p] = phi[h, r, p]
            if L == W:
                fill(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, 0)
            if enters > 0:
                T.copy(entering[b, h, :, :], state)
            else:
                T.clear(state)
            skip[0] = D[h]
            factor(psi_l, psi, h, tx)
            for u in T.unroll(part.units):
                one[u] = 1.0
            for n in T.serial(nc):
                if L > W and n % (W // C) == 0:
                    T.sync_threads()
                    fill(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, n * C)
                    T.sync_threads()
                at = n * C % W
                if ahead == 0:
                    start(*given, b, h, n)
                weights(w_s, lc_s, sk_s, gm_s, at)
                T.copy(state, h_s)
                for i, p in T.Parallel(N, P):
                    state[i, p] = state[i, p] * read_s[at + C - 1]
                loads.wait(full, n, nc, copies)
                angles(cos, sin, cs_s, loads.slot(n) * (A // 4), tx)
                piece(v_l, v_s, loads.slot(n) * C, tx)
                row_scales(scale, write_s, at, tx)
                expanded(x_s, v_l, one, psi_l, tx)
                expanded(xw_s, v_l, scale, psi_l, tx)
                rotated(q_s, q_raw, qb_s, cos, sin, tx, n)
                rotated(k_s, k_raw, kb_s, cos, sin, tx, n)
                T.sync_threads()
                if ahead > 0 and n + ahead < nc:
                    start(*given, b, h, n + ahead)
                if paired:
                    T.wgmma_gemm(q_s, h_s, y, clear_accum=True, policy=by_rows)
                    T.wgmma_gemm(q_s, k_s, score, transpose_B=True, clear_accum=True, policy=by_rows)
                    T.gemm(k_s, xw_s, state, transpose_A=True)
                    T.warpgroup_fence_operand(y, num_regs=M * P // threads)
                    T.warpgroup_fence_operand(score, num_regs=M * M // threads)
                else:
                    T.gemm(q_s, h_s, y, clear_accum=True)
                    T.gemm(q_s, k_s, score, transpose_B=True, clear_accum=True)
                    T.gemm(k_s, xw_s, state, transpose_A=True)
                T.copy(h_s, states[b, h, n, :, :], disable_tma=stored)
                if psiv_cache:
                    T.copy(x_s, psiv[b, h, n, :, :], disable_tma=stored)
                for i, j in T.Parallel(M, M):
                    mixed[i, j] = bf16(scalar.weighted(score[i, j], w_s[i % C, j % C], i == j, skip[0]))
                for i, p in T.Parallel(M, P):
                    y[i, p] = y[i, p] * read_s[at + i % C]
                if own_rows:
                    T.gemm(mixed, x_s, y, policy=by_rows)
                else:
                    T.copy(mixed, mix_s)
                    T.gemm(mix_s, x_s, y)
                for i, p in T.Parallel(M, P):
                    if s.gated:
                        half_u = f32(z_s[loads.held_slot(n) * C + i % C, p]) * zeta_s[i // C, p]
                        y[i, p] = y[i, p] * scalar.silu(half_u, scalar.bent(half_u))
                    if s.reduced:
                        y[i, p] = y[i, p] * phi_s[i // C, p]
                T.copy(y, x_s)
                if s.reduced:
                    for c, p in T.Parallel(C, P):
                        o[b, n * C + c, h, p] = bf16(tiles.rank_sum(x_s, c, p, R, C))
                else:
                    for i, p in T.Parallel(M, P):
                        o[b, n * C + i % C, i // C, h, p] = x_s[i, p]
            if sequential:
                T.copy(state, final[b, h, :, :])

    return f3_outputs
