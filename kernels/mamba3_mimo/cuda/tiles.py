"""Tile builders shared by the kernels: biased rotated q and k, PsiV, decay weights, gate.

Each is a TileLang macro expanded into the calling kernel. Letters: see shape.py. Rows are i = r * C + c.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0917
# mypy: ignore-errors

from typing import Any

import tilelang.language as T

BF16, F16, F32 = "bfloat16", "float16", "float32"


def f32(value: Any) -> Any:
    """Return `value` as float32."""
    return T.Cast(F32, value)


def bf16(value: Any) -> Any:
    """Return `value` rounded to bfloat16."""
    return T.Cast(BF16, value)


def rank_sum(tile_MP: Any, c: Any, p: Any, ranks: int, chunk: int) -> Any:
    """Return the sum over ranks of tile[r * C + c, p]."""
    total = f32(tile_MP[c, p])
    for r in range(1, ranks):
        total = total + f32(tile_MP[r * chunk + c, p])
    return total


def make_load(s: Any) -> Any:
    """Return macro(raw_s [M,N], raw [B,S,R,G,N], bar, b, h, t0): start the bulk copy of one chunk of q or k."""
    C, R, per_group = s.C, s.R, s.heads_per_group

    @T.macro
    def load(raw_s, raw, bar, b, h, t0):
        for r in T.unroll(R):
            T.tma_copy(raw[b, t0 : t0 + C, r, h // per_group, :], raw_s[r * C : (r + 1) * C, :], barrier=bar[0])

    return load


def make_fetch(s: Any) -> Any:
    """Return macro(h_s, v_s, z_s, do_s, cs_s, their tensors, bar, b, h, t0, slot): start the other copies of a chunk.

    v_s [2C,P] and cs_s [2A/4,C,8] hold two chunks, because the end of one chunk still reads them.
    """
    A, C = s.A, s.C

    @T.macro
    def fetch(h_s, v_s, z_s, do_s, cs_s, states, v, z, do, cs, bar, b, h, t0, slot):
        T.tma_copy(states[b, h, t0 // C, :, :], h_s, barrier=bar[0])
        T.tma_copy(v[b, t0 : t0 + C, h, :], v_s[slot * C : (slot + 1) * C, :], barrier=bar[0])
        T.tma_copy(z[b, t0 : t0 + C, h, :], z_s, barrier=bar[0])
        T.tma_copy(do[b, t0 : t0 + C, h, :], do_s, barrier=bar[0])
        T.tma_copy(cs[b, h, t0 // C, :, :, :], cs_s[slot * (A // 4) : (slot + 1) * (A // 4), :, :], barrier=bar[0])

    return fetch


def make_angles(s: Any, threads: int) -> Any:
    """Return macro(cos, sin [8 * turns], cs [B,H,S/C,A/4,C,8], b, h, t0, tx): the thread's angles of one chunk.

    Thread tx works on row tx % M of a tile and on groups of 8 columns, so that the lanes of a warp hit different banks
    of a swizzled tile. `turns` = A * M / (8 * threads) groups turn.
    """
    C, M, turns = s.C, s.M, s.A * s.M // (8 * threads)

    @T.macro
    def angles(cos, sin, cs, b, h, t0, tx):
        for u in T.unroll(turns):
            for e in T.vectorized(8):
                cos[u * 8 + e] = cs[b, h, t0 // C, (tx // M + u * (threads // M)) * 2, tx % C, e]
            for e in T.vectorized(8):
                sin[u * 8 + e] = cs[b, h, t0 // C, (tx // M + u * (threads // M)) * 2 + 1, tx % C, e]

    return angles


def make_bias(s: Any, threads: int) -> Any:
    """Return macro(held [N * M / threads], bias [H,R,N] or [R,N] slice, h, tx): the thread's biases into registers."""
    A, C, M, half = s.A, s.C, s.M, s.N // 2
    turns, stills, step = A * M // (8 * threads), (half - A) * M // (8 * threads), threads // M

    @T.macro
    def hold(held, bias, h, tx):
        for u in T.unroll(turns + stills):
            for e in T.vectorized(8):
                held[u * 16 + e] = bias[h, tx % M // C, (tx // M + u * step) * 8 + e]
            for e in T.vectorized(8):
                held[u * 16 + 8 + e] = bias[h, tx % M // C, half + (tx // M + u * step) * 8 + e]

    return hold


def make_rotated(s: Any, threads: int) -> Any:
    """Return macro(tile_s [M,N], raw_s [M,N], held, cos, sin, tx): add the bias, rotate, round to bf16.

    `held` [N * M / threads] bf16 are the thread's biases, from `make_bias`.
    """
    A, M, half = s.A, s.M, s.N // 2
    turns, stills, step = A * M // (8 * threads), (half - A) * M // (8 * threads), threads // M

    @T.macro
    def rotated(tile_s, raw_s, held, cos, sin, tx):
        lo, hi = T.alloc_local((8,), BF16), T.alloc_local((8,), BF16)
        for u in T.unroll(turns):
            for e in T.vectorized(8):
                lo[e] = raw_s[tx % M, (tx // M + u * step) * 8 + e] + held[u * 16 + e]
            for e in T.vectorized(8):
                hi[e] = raw_s[tx % M, half + (tx // M + u * step) * 8 + e] + held[u * 16 + 8 + e]
            for e in T.vectorized(8):
                tile_s[tx % M, (tx // M + u * step) * 8 + e] = bf16(
                    f32(lo[e]) * f32(cos[u * 8 + e]) - f32(hi[e]) * f32(sin[u * 8 + e])
                )
            for e in T.vectorized(8):
                tile_s[tx % M, half + (tx // M + u * step) * 8 + e] = bf16(
                    f32(lo[e]) * f32(sin[u * 8 + e]) + f32(hi[e]) * f32(cos[u * 8 + e])
                )
        for u in T.unroll(turns, turns + stills):
            for e in T.vectorized(8):
                tile_s[tx % M, (tx // M + u * step) * 8 + e] = (
                    raw_s[tx % M, (tx // M + u * step) * 8 + e] + held[u * 16 + e]
                )
            for e in T.vectorized(8):
                tile_s[tx % M, half + (tx // M + u * step) * 8 + e] = (
                    raw_s[tx % M, half + (tx // M + u * step) * 8 + e] + held[u * 16 + 8 + e]
                )

    return rotated


def make_rotated_shared(s: Any, threads: int) -> Any:
    """Return `make_rotated`'s macro with the biases read from bias_s [1,R,N] in shared memory at every use."""
    hold, rotated = make_bias(s, threads), make_rotated(s, threads)

    @T.macro
    def rotated_shared(tile_s, raw_s, bias_s, cos, sin, tx):
        held = T.alloc_local((s.N * s.M // threads,), BF16)
        hold(held, bias_s, 0, tx)
        rotated(tile_s, raw_s, held, cos, sin, tx)

    return rotated_shared


def make_unrotated(s: Any, threads: int) -> Any:
    """Return macro(out_s, grad_s, tile_s [M,N], turn [8 * turns], cos, sin, tx): undo the rotation of grad_s.

    grad_s holds the gradient of the rotated tile_s; all bf16. Adds the gradient of the thread's angles to `turn`.
    """
    A, M, half = s.A, s.M, s.N // 2
    turns, stills, step = A * M // (8 * threads), (half - A) * M // (8 * threads), threads // M

    @T.macro
    def unrotated(out_s, grad_s, tile_s, turn, cos, sin, tx):
        lo, hi = T.alloc_local((8,), BF16), T.alloc_local((8,), BF16)
        left, right = T.alloc_local((8,), BF16), T.alloc_local((8,), BF16)
        for u in T.unroll(turns):
            for e in T.vectorized(8):
                lo[e] = grad_s[tx % M, (tx // M + u * step) * 8 + e]
            for e in T.vectorized(8):
                hi[e] = grad_s[tx % M, half + (tx // M + u * step) * 8 + e]
            for e in T.vectorized(8):
                left[e] = tile_s[tx % M, (tx // M + u * step) * 8 + e]
            for e in T.vectorized(8):
                right[e] = tile_s[tx % M, half + (tx // M + u * step) * 8 + e]
            for e in T.unroll(8):
                turn[u * 8 + e] += f32(hi[e]) * f32(left[e]) - f32(lo[e]) * f32(right[e])
            for e in T.vectorized(8):
                out_s[tx % M, (tx // M + u * step) * 8 + e] = bf16(
                    f32(lo[e]) * f32(cos[u * 8 + e]) + f32(hi[e]) * f32(sin[u * 8 + e])
                )
            for e in T.vectorized(8):
                out_s[tx % M, half + (tx // M + u * step) * 8 + e] = bf16(
                    f32(hi[e]) * f32(cos[u * 8 + e]) - f32(lo[e]) * f32(sin[u * 8 + e])
                )
        for u in T.unroll(stills):
            for e in T.vectorized(8):
                out_s[tx % M, A + (tx // M + u * step) * 8 + e] = grad_s[tx % M, A + (tx // M + u * step) * 8 + e]
            for e in T.vectorized(8):
                out_s[tx % M, half + A + (tx // M + u * step) * 8 + e] = grad_s[
                    tx % M, half + A + (tx // M + u * step) * 8 + e
                ]

    return unrotated


def make_expanded(s: Any, threads: int) -> Any:
    """Return macro(x_s [M,P], source, scale, factor, tx): x[r * C + c, p] = source * scale[c] * factor[r, p].

    `source` is the thread's piece of a [C,P] tile: 4 columns in each of its rows; `scale` one number per such row;
    `factor` [4 * R] the thread's columns of a [R,P] tensor.
    """
    C, R, P = s.C, s.R, s.P
    step = 4 * threads // P

    @T.macro
    def expanded(x_s, source, scale, factor, tx):
        wide = T.alloc_local((C // step * 4,), F32)
        for u in T.unroll(C // step):
            for e in T.vectorized(4):
                wide[u * 4 + e] = f32(source[u * 4 + e]) * scale[u]
        for r in T.unroll(R):
            for u in T.unroll(C // step):
                for e in T.vectorized(4):
                    x_s[r * C + u * step + tx // (P // 4), tx % (P // 4) * 4 + e] = bf16(
                        wide[u * 4 + e] * factor[r * 4 + e]
                    )

    return expanded


def make_factor(s: Any) -> Any:
    """Return macro(factor [4 * R], tensor [H,R,P], h, tx): the thread's columns of psi into registers."""
    R, P = s.R, s.P

    @T.macro
    def factor(out, tensor, h, tx):
        for r in T.unroll(R):
            for e in T.vectorized(4):
                out[r * 4 + e] = tensor[h, r, tx % (P // 4) * 4 + e]

    return factor


def make_piece(s: Any, threads: int) -> Any:
    """Return macro(piece [4 * rows], tensor [B,S,H,P], b, h, t0, tx): the thread's piece of a chunk of v, z or dO."""
    C, P = s.C, s.P
    step = 4 * threads // P

    @T.macro
    def piece(out, tensor, b, h, t0, tx):
        for u in T.unroll(C // step):
            for e in T.vectorized(4):
                out[u * 4 + e] = tensor[b, t0 + u * step + tx // (P // 4), h, tx % (P // 4) * 4 + e]

    return piece


def make_scales(s: Any) -> Any:
    """Return macro(read_s, write_s [L], lc, sk, b, h, sc): the scalars of a super-chunk.

    read_s is the decay from the start of the token's chunk to the token; write_s, to its end, times the write scale.
    """
    S, C, L = s.S, s.C, s.L

    @T.macro
    def scales(read_s, write_s, lc, sk, b, h, sc):
        for t in T.Parallel(L):
            at = T.min(sc * L + t, S - 1)
            last = T.min(sc * L + t // C * C + C - 1, S - 1)
            read_s[t] = T.exp2(lc[b, h, at])
            write_s[t] = T.exp2(lc[b, h, last] - lc[b, h, at]) * sk[b, h, at]

    return scales


def make_weight_scales(s: Any) -> Any:
    """Return macro(lc_s, sk_s, gm_s, read_s, write_s [L], lc, sk, gm, b, h, sc): `make_scales` and its sources."""
    S, L = s.S, s.L
    scales = make_scales(s)

    @T.macro
    def weight_scales(lc_s, sk_s, gm_s, read_s, write_s, lc, sk, gm, b, h, sc):
        scales(read_s, write_s, lc, sk, b, h, sc)
        for t in T.Parallel(L):
            at = T.min(sc * L + t, S - 1)
            lc_s[t] = lc[b, h, at]
            sk_s[t] = sk[b, h, at]
            gm_s[t] = gm[b, h, at]

    return weight_scales


def make_weights(s: Any) -> Any:
    """Return macro(w_s [C,C], lc_s, sk_s, gm_s, at): the weight of the write of time u in the output of time t."""
    C = s.C

    @T.macro
    def weights(w_s, lc_s, sk_s, gm_s, at):
        for t, u in T.Parallel(C, C):
            decay = T.exp2(T.min(lc_s[at + t] - lc_s[at + u], 0.0)) * sk_s[at + u]
            w_s[t, u] = T.if_then_else(t > u, decay, T.if_then_else(t == u, gm_s[at + t], 0.0))

    return weights


def row_sum(rows: Any, which: int, c: Any, ranks: int, chunk: int) -> Any:
    """Return the sum over ranks of rows[which, r * C + c]."""
    total = rows[which, c]
    for r in range(1, ranks):
        total = total + rows[which, r * chunk + c]
    return total


def pair_sum(left_MR: Any, right_MR: Any, i: Any, ranks: int) -> Any:
    """Return the sum over ranks of left[i, r] * right[i, r]."""
    total = left_MR[i, 0] * right_MR[i, 0]
    for r in range(1, ranks):
        total = total + left_MR[i, r] * right_MR[i, r]
    return total


def mixed_sum(mix_MM: Any, right_MR: Any, i: Any, ranks: int, chunk: int) -> Any:
    """Return the sum over ranks r of mix[i, r * C + i % C] * right[i, r]: the same step's share of <g, mix x>."""
    total = f32(mix_MM[i, i % chunk]) * right_MR[i, 0]
    for r in range(1, ranks):
        total = total + f32(mix_MM[i, r * chunk + i % chunk]) * right_MR[i, r]
    return total
