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


def make_rotated(s: Any) -> Any:
    """Return macro(tile_s [M,N], raw [B,S,R,G,N], bias [H,R,N], cs [B,H,S,2A], b, h, t0): bias, rotation, rounding."""
    A, C, M, half, per_group = s.A, s.C, s.M, s.N // 2, s.heads_per_group

    @T.macro
    def rotated(tile_s, raw, bias, cs, b, h, t0):
        for i, j in T.Parallel(M, A):
            c = f32(cs[b, h, t0 + i % C, j])
            w = f32(cs[b, h, t0 + i % C, A + j])
            lo = f32(raw[b, t0 + i % C, i // C, h // per_group, j] + bias[h, i // C, j])
            hi = f32(raw[b, t0 + i % C, i // C, h // per_group, half + j] + bias[h, i // C, half + j])
            tile_s[i, j] = bf16(lo * c - hi * w)
            tile_s[i, half + j] = bf16(lo * w + hi * c)
        if half > A:
            for i, j in T.Parallel(M, half - A):
                tile_s[i, A + j] = raw[b, t0 + i % C, i // C, h // per_group, A + j] + bias[h, i // C, A + j]
                tile_s[i, half + A + j] = (
                    raw[b, t0 + i % C, i // C, h // per_group, half + A + j] + bias[h, i // C, half + A + j]
                )

    return rotated


def make_unrotated(s: Any) -> Any:
    """Return macro(out [B,S,R,H,N], tile_s [M,>=N] fp32, cs, b, h, t0): inverse rotation, rounding, store."""
    A, C, M, half = s.A, s.C, s.M, s.N // 2

    @T.macro
    def unrotated(out, tile_s, cs, b, h, t0):
        for i, j in T.Parallel(M, A):
            c = f32(cs[b, h, t0 + i % C, j])
            w = f32(cs[b, h, t0 + i % C, A + j])
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
