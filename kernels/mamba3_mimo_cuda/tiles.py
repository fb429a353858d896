"""Tile builders shared by the kernels: biased rotated q and k, PsiV, decay weights, gate.

Each is a TileLang macro expanded into the calling kernel. Letters: see shape.py. Rows are i = r * C + c.
"""

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
    total = tile_MP[c, p]
    for r in range(1, ranks):
        total = total + tile_MP[r * chunk + c, p]
    return total


def make_fetch(s: Any) -> Any:
    """Return macro(lo, hi, lo_still, hi_still, raw [B,S,R,G,N], b, h, t0): one chunk of q or k into registers.

    lo and hi are fragments [M,A] with the columns that turn, lo_still and hi_still [M,max(1,N/2-A)] with the others.
    """
    A, C, M, half, per_group = s.A, s.C, s.M, s.N // 2, s.heads_per_group

    @T.macro
    def fetch(lo, hi, lo_still, hi_still, raw, b, h, t0):
        for i, j in T.Parallel(M, A):
            lo[i, j] = raw[b, t0 + i % C, i // C, h // per_group, j]
            hi[i, j] = raw[b, t0 + i % C, i // C, h // per_group, half + j]
        if A < half:
            for i, j in T.Parallel(M, half - A):
                lo_still[i, j] = raw[b, t0 + i % C, i // C, h // per_group, A + j]
                hi_still[i, j] = raw[b, t0 + i % C, i // C, h // per_group, half + A + j]

    return fetch


def make_fetch_angles(s: Any) -> Any:
    """Return macro(cos [M,A], sin [M,A], cs [B,H,S,2A], b, h, t0): the angles of one chunk into registers."""
    A, C, M = s.A, s.C, s.M

    @T.macro
    def fetch_angles(cos, sin, cs, b, h, t0):
        for i, j in T.Parallel(M, A):
            cos[i, j] = cs[b, h, t0 + i % C, j]
            sin[i, j] = cs[b, h, t0 + i % C, A + j]

    return fetch_angles


def make_rotated(s: Any) -> Any:
    """Return macro(tile_s [M,N], lo, hi, lo_still, hi_still, cos, sin, bias_s [R,N]): add the bias, rotate, round."""
    A, C, M, half = s.A, s.C, s.M, s.N // 2

    @T.macro
    def rotated(tile_s, lo, hi, lo_still, hi_still, cos, sin, bias_s):
        for i, j in T.Parallel(M, A):
            a = f32(lo[i, j] + bias_s[i // C, j])
            z = f32(hi[i, j] + bias_s[i // C, half + j])
            tile_s[i, j] = bf16(a * f32(cos[i, j]) - z * f32(sin[i, j]))
            tile_s[i, half + j] = bf16(a * f32(sin[i, j]) + z * f32(cos[i, j]))
        if A < half:
            for i, j in T.Parallel(M, half - A):
                tile_s[i, A + j] = lo_still[i, j] + bias_s[i // C, A + j]
                tile_s[i, half + A + j] = hi_still[i, j] + bias_s[i // C, half + A + j]

    return rotated


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


def make_unrotated(s: Any) -> Any:
    """Return macro(out [B,S,R,H,N], tile_s [M,>=N] fp32, cs_s [C,2A], b, h, t0): inverse rotation, rounding, store."""
    A, C, M, half = s.A, s.C, s.M, s.N // 2

    @T.macro
    def unrotated(out, tile_s, cs_s, b, h, t0):
        for i, j in T.Parallel(M, A):
            c = f32(cs_s[i % C, j])
            w = f32(cs_s[i % C, A + j])
            lo = tile_s[i, j]
            hi = tile_s[i, half + j]
            out[b, t0 + i % C, i // C, h, j] = bf16(lo * c + hi * w)
            out[b, t0 + i % C, i // C, h, half + j] = bf16(hi * c - lo * w)
        if half > A:
            for i, j in T.Parallel(M, half - A):
                out[b, t0 + i % C, i // C, h, A + j] = bf16(tile_s[i, A + j])
                out[b, t0 + i % C, i // C, h, half + A + j] = bf16(tile_s[i, half + A + j])

    return unrotated


def time_sum(tile_MP: Any, r: Any, p: Any, chunk: int) -> Any:
    """Return the sum over the times of one rank of tile[r * C + c, p]."""
    total = tile_MP[r * chunk, p]
    for c in range(1, chunk):
        total = total + tile_MP[r * chunk + c, p]
    return total


def make_column_sums(s: Any) -> Any:
    """Return macro(out [B,K,H,R,P], acc [M,P], stage_s, b, sc, h): sum the accumulator over time and store."""
    C, R, P = s.C, s.R, s.P

    @T.macro
    def column_sums(out, acc, stage_s, b, sc, h):
        T.copy(acc, stage_s[:, 0:P])
        for r, p in T.Parallel(R, P):
            out[b, sc, h, r, p] = time_sum(stage_s, r, p, C)

    return column_sums


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
