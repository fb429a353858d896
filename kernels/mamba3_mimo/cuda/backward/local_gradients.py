"""B1, which prepares the backward walk: each super-chunk's addition to the gradient of its entering state.

Letters: see shape.py. Scalars per token: see prefix.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from ablate.kernels.mamba3_mimo.cuda.pieces import scalar, tiles
from ablate.kernels.mamba3_mimo.cuda.pieces.outer import Registers, make_outer
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, UNPACKED, bf16, f32
from ablate.kernels.mamba3_mimo.cuda.pieces.walk import make_early_loads, make_sum, staged, threads_for
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def make_gated(s: ScanShape, threads: int) -> Any:
    """Return macro(g_s, do_s, z_s, scale, zeta, phi, first, tx, into): the gradient of y, times `scale`.

    Writes g [M,P] = dO * silu(z * zeta) * phi from row `into` of g_s on. The chunk's tiles start at row `first` * C of
    z_s [slots*C,P] and of do_s, which has C rows per chunk, or M without phi. `zeta` (halved) and `phi` [4 * R] are the
    thread's columns. `scale` has one number per row of the thread.
    """
    C, R = s.C, s.R
    lanes, step, units, guarded = tiles.pieces(s, threads)

    @T.macro
    def gated(g_s, do_s, z_s, scale, zeta, phi, first, tx, into):
        row = T.min(tx // lanes, C - 1) if guarded else tx // lanes
        z_l, do_l = T.alloc_local((units * 4,), F32), T.alloc_local((units * 4,), F32)
        grad, half_u = T.alloc_local((4,), F32), T.alloc_local((4,), F32)
        # all loads first, because the compiler cannot know that g_s is another buffer
        for u in T.unroll(units):
            for e in T.vectorized(4):
                if s.gated:
                    z_l[u * 4 + e] = f32(z_s[first * C + u * step + row, tx % lanes * 4 + e])
            for e in T.vectorized(4):
                if s.reduced:
                    do_l[u * 4 + e] = f32(do_s[first * C + u * step + row, tx % lanes * 4 + e]) * scale[u]
        for r in T.unroll(R):
            for u in T.unroll(units):
                for e in T.vectorized(4):
                    if s.reduced:
                        grad[e] = do_l[u * 4 + e] * phi[r * 4 + e]
                    else:
                        grad[e] = f32(do_s[(first * R + r) * C + u * step + row, tx % lanes * 4 + e]) * scale[u]
                if s.gated:
                    for e in T.vectorized(4):
                        half_u[e] = z_l[u * 4 + e] * zeta[r * 4 + e]
                    for e in T.vectorized(4):
                        grad[e] = grad[e] * scalar.silu(half_u[e], scalar.bent(half_u[e]))
                if (not guarded) | (tx // lanes < C):
                    for e in T.vectorized(4):
                        g_s[into + r * C + u * step + tx // lanes, tx % lanes * 4 + e] = bf16(grad[e])

    return gated


def local_gradients(s: ScanShape, v: Variant) -> Any:
    """B1: local[b,h] = sum over the super-chunk of wq * q~ (x) g, fp32 [B,H,N,P].

    Computes the last `taken` of the `super_chunks` of a row. `do` is [B,S,H,P], or [B,S,R,H,P] without phi.
    """
    B, H, N, P, R, A, C, M, L = s.B, s.H, s.N, s.P, s.R, s.A, s.C, s.M, s.L
    loads, threads = make_early_loads(s, v), threads_for(s)
    blocks = {64: 4, 128: 3}.get(N, 0) if (P, C, M) == (64, 16, 64) and v.pipeline_stages < 2 else 0
    outer, factor, gated = make_outer(s, threads, loads), tiles.make_factor(s), make_gated(s, threads)
    row_scales = tiles.make_row_scales(s, threads)
    part, do_rows = tiles.pieces(s, threads), C if s.reduced else M
    copies = len(loads.columns()) + 2 + s.gated

    @T.macro
    def start(q_raw, z_s, do_s, cs_s, q, z, do, cs, full, b, h, n):
        t0, slot = n * C, loads.slot(n)
        loads.rows(q_raw, q, full, b, h, t0, n)
        if s.gated:
            loads.copy(z[b, t0 : t0 + C, h, :], z_s[slot * C : (slot + 1) * C, :], full, n)
        if s.reduced:
            loads.copy(do[b, t0 : t0 + C, h, :], do_s[slot * C : (slot + 1) * C, :], full, n)
        else:
            loads.ranks_in(do_s, do, [slice(0, P)], full, b, h, t0, n)
        loads.copy(cs[b, h, t0 // C, :, :, :], cs_s[slot * (A // 4) : (slot + 1) * (A // 4), :, :], full, n)
        loads.posted(full, n)

    @T.macro
    def write(do_s, z_s, scale, zeta_l, phi_l, g_s, wq_s, n, tx):
        row_scales(scale, wq_s, n * C, tx)
        gated(g_s, do_s, z_s, scale, zeta_l, phi_l, loads.slot(n), tx, n % outer.slots * M)

    begin, total = make_sum(s, v, loads, outer, start, write, copies)

    @T.prim_func
    @takes(s, v)
    def b1_local_gradients(q, z, do, q_bias, zeta, phi, cs, wq, local, super_chunks: T.int32, taken: T.int32):
        with T.Kernel(H, taken, B // super_chunks, threads=threads) as (h, i, row):
            b = row * super_chunks + super_chunks - taken + i
            T.assume((b >= 0) & (b < B) & (b < s.most_walks))  # otherwise the compiler sees no contiguous copy of cs
            T.import_source(UNPACKED)
            if blocks:
                T.annotate_min_blocks_per_sm(blocks)
            T.annotate_pass_configs({PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True})
            q_raw = loads.tile()
            z_s = staged(s.gated, (loads.slots * C, P), BF16)
            do_s = T.alloc_shared((loads.slots * do_rows, P), BF16)
            cs_s = T.alloc_shared((loads.slots * (A // 4), C, 8), F16)
            g_s = T.alloc_shared((outer.slots * M, P), BF16)
            wq_s = T.alloc_shared((L,), F32)
            acc, left, held = outer.registers()
            zeta_l, phi_l = (T.alloc_local((4 * R,), F32) for _ in range(2))
            scale = T.alloc_local((part.units,), F32)
            desc = T.alloc_wgmma_desc()
            full = loads.barriers(threads)
            T.annotate_layout({**loads.layouts(q_raw), **outer.layouts(g_s)})
            given, mine = (q_raw, z_s, do_s, cs_s, q, z, do, cs, full), Registers(acc, left, held, desc)
            tx = T.get_thread_binding()
            begin(given, mine, g_s, q_bias, b, h, tx)
            if s.gated:
                factor(zeta_l, zeta, h, tx)
                for e in T.unroll(4 * R):
                    zeta_l[e] = 0.5 * zeta_l[e]
            if s.reduced:
                factor(phi_l, phi, h, tx)
            total(given, (do_s, z_s, scale, zeta_l, phi_l), mine, q_raw, cs_s, g_s, wq_s, wq, local, full, b, h, tx)

    return b1_local_gradients
