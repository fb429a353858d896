"""F3 in the form of lifted.py: two barriers per chunk, and only k~, x and the entering state in shared memory."""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from ablate.kernels.mamba3_mimo.cuda.forward import lifted
from ablate.kernels.mamba3_mimo.cuda.pieces import tiles
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import make_loads, make_store
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import end_batch, swizzled_lines
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, UNPACKED
from ablate.kernels.mamba3_mimo.cuda.pieces.walk import make_output_start, staged, threads_for
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def outputs(s: ScanShape, v: Variant) -> Any:
    """F3. `outputs.outputs` documents its inputs and outputs."""
    B, H, N, P, R, A, C, M, L = s.B, s.H, s.N, s.P, s.R, s.A, s.C, s.M, s.L
    loads, threads, W, rows = make_loads(s, v), threads_for(s), tiles.window(s), lifted.Rows(s)
    ahead = loads.ahead
    angles, biases = tiles.make_angles(s, threads), tiles.make_bias(s, threads)
    rotation = tiles.make_rotated(s, threads, loads.at, tiles.PAIRED)
    piece, factor, expanded = tiles.make_piece(s, threads), tiles.make_factor(s), tiles.make_expanded(s, threads)
    row_scales = tiles.make_row_scales(s, threads)
    hold, lift = lifted.make_lift(s, loads)
    read_state, write_state, hand_on = lifted.make_state(s)
    prepare, read, write, mix = lifted.make_products(s)
    w_size, weights, weighted = lifted.make_pair_weights(s)
    load_gates, finish = lifted.make_epilogue(s)
    fill, way, part = tiles.make_window(s), tiles.spread(s, threads), tiles.pieces(s, threads)
    save, saved = make_store(v)
    start, copies = make_output_start(s, loads)
    psiv_cache, sequential = v.psiv_cache, v.schedule == "sequential"

    @T.prim_func
    @takes(s, v)
    def f3_outputs(q, k, v, z, q_bias, k_bias, psi, zeta, phi, D, cs, lc, sk, gm, entering, o, states, psiv, final,
                   enters: T.int32):  # fmt: skip
        with T.Kernel(H, B, threads=threads) as (h, b):
            T.assume(b < s.most_walks)  # allows 32-bit offsets if the walks do
            T.import_source(UNPACKED)
            T.annotate_pass_configs({PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True})
            if N * P <= 64 * 64 and C <= 32 and ahead <= 1:
                T.annotate_min_blocks_per_sm(3)
            q_raw, k_raw = loads.tile(), loads.tile()
            v_s = T.alloc_shared((loads.slots * C, P), BF16)
            z_s = staged(s.gated, (loads.held * C, P), BF16)
            cs_s = T.alloc_shared((loads.slots * (A // 4), C, 8), F16)
            k_s, h_s = T.alloc_shared((M, N), BF16), T.alloc_shared((N, P), BF16)
            x_s, xw_s = T.alloc_shared((M, P), BF16), T.alloc_shared((M, P), BF16)
            kb_s, psi_s = T.alloc_shared((1, R, N), BF16), T.alloc_shared((1, R, P), F32)
            gates_s = T.alloc_shared((R, 2 * P + 4), F32)
            lc_s, sk_s, gm_s, read_s, write_s = (T.alloc_shared((W,), F32) for _ in range(5))
            psi_l, skip = T.alloc_local((4 * R,), F32), T.alloc_local((1,), F32)
            cos, sin = (T.alloc_local((way.angles,), F16) for _ in range(2))
            v_l = T.alloc_local((part.units * 4,), BF16)
            raw, bias = (T.alloc_local((way.held,), BF16) for _ in range(2))
            one, scale = (T.alloc_local((part.units,), F32) for _ in range(2))
            state, y = T.alloc_local((N * P // 128,), F32), T.alloc_local((P // 2,), F32)
            left, held = T.alloc_local((N // 2,), BF16), T.alloc_local((N // 2,), BF16)
            score, mixed, w = T.alloc_local((32,), F32), T.alloc_local((32,), BF16), T.alloc_local((w_size,), F32)
            entering_d, written_d, left_d, right_d, values_d = (T.alloc_wgmma_desc() for _ in range(5))
            full = loads.barriers(threads)
            T.annotate_layout(loads.layouts(q_raw, k_raw))
            T.annotate_layout({tile: swizzled_lines(tile) for tile in (k_s, h_s, x_s, xw_s)})
            if s.gated:
                T.annotate_layout({z_s: swizzled_lines(z_s)})
            tx = T.get_thread_binding()
            nc, given = L // C, (q_raw, k_raw, v_s, z_s, cs_s, q, k, v, z, cs, full)
            for n in tuple(range(min(ahead, nc))):
                start(*given, b, h, n)
            T.copy(k_bias[h : h + 1, :, :], kb_s, disable_tma=True)
            T.copy(psi[h : h + 1, :, :], psi_s, disable_tma=True)
            load_gates(gates_s, zeta, phi, h, tx)
            hold(held, q_bias, h, tx)
            if L == W:
                fill(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, 0)
                T.sync_threads()
            if enters > 0:
                read_state(state, entering, b, h, tx)
            else:
                for c in T.unroll(N * P // 128):
                    state[c] = 0.0
            skip[0] = D[h]
            prepare(entering_d, written_d, left_d, right_d, values_d, h_s, k_s, x_s, xw_s)
            for u in T.unroll(part.units):
                one[u] = 1.0
            for n in T.serial(nc):
                if L > W and n % (W // C) == 0:
                    fill(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, n * C)
                    T.sync_threads()
                at = n * C % W
                if ahead == 0:
                    start(*given, b, h, n)
                write_state(h_s, state, tx)
                for c in T.unroll(N * P // 128):
                    state[c] = state[c] * read_s[at + C - 1]
                weights(w, lc_s, sk_s, gm_s, at, tx)
                loads.wait(full, n, nc, copies)
                rotation.fetch(raw, k_raw, tx, n)  # before any write: the compiler may assume the same memory
                angles(cos, sin, cs_s, loads.slot(n) * (A // 4), tx)
                piece(v_l, v_s, loads.slot(n) * C, tx)
                row_scales(scale, write_s, at, tx)
                factor(psi_l, psi_s, 0, tx)
                expanded(x_s, v_l, one, psi_l, tx)
                expanded(xw_s, v_l, scale, psi_l, tx)
                biases(bias, kb_s, 0, tx)
                rotation.fetched(k_s, raw, bias, cos, sin, tx)
                lift(left, q_raw, held, cs_s, n, tx)
                T.fence_proxy_async()
                T.sync_threads()
                read(y, score, left, entering_d, written_d)
                write(state, left_d, right_d)
                save(h_s, states[b, h, n, :, :])
                if psiv_cache:
                    save(x_s, psiv[b, h, n, :, :])
                if ahead > 0 and n + ahead < nc:  # after the products, because one thread issues the copies slowly
                    start(*given, b, h, n + ahead)
                end_batch(1, y, score)
                weighted(mixed, score, w, skip[0], tx)
                for upper in (0, 1):
                    for block in T.unroll(P // 8):
                        for e in T.unroll(2):
                            y[block * 4 + upper * 2 + e] *= read_s[at + rows.token(tx // 32, tx % 32 // 4, upper)]
                mix(y, mixed, values_d)
                end_batch(0, y, state)
                finish(y, o, z_s, gates_s, b, h, n * C, loads.held_slot(n) * C, tx)
                saved()
                T.sync_threads()
            if sequential:
                hand_on(final, state, b, h, tx)

    return f3_outputs
