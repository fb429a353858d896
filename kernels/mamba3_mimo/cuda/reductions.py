"""Small kernels after the walk: heads into groups, biases, and the gradients of the scalars. Letters: see shape.py."""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0917
# mypy: ignore-errors

import math
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.prefix import tanh
from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.tiles import BF16, F32, bf16, f32

HEAD_BLOCK = 128
"""Tokens per block of `reduce_heads`."""


def reduce_heads(s: ScanShape, *, threads: int = 128) -> Any:
    """B4: sum per-head dq or dk [B,S,R,H,N] bf16 over the heads of a group -> [B,S,R,G,N] bf16.

    Also `p_bias` fp32 [B,S/HEAD_BLOCK,H,R,N]: the sum over the block's tokens, per head.
    """
    B, S, H, G, N, R = s.B, s.S, s.H, s.G, s.N, s.R
    per_group, blocks, lanes = s.heads_per_group, -(-s.S // HEAD_BLOCK), s.N // 8
    rows = threads // lanes
    turns = HEAD_BLOCK // rows

    @T.prim_func
    def b4_reduce_heads(
        per_head: T.Tensor((B, S, R, H, N), BF16),
        grouped: T.Tensor((B, S, R, G, N), BF16),
        p_bias: T.Tensor((B, blocks, H, R, N), F32),
    ):
        with T.Kernel(blocks, R * G, B, threads=threads) as (blk, rg, b):
            tx = T.get_thread_binding()
            total = T.alloc_local((turns * 8,), F32)
            one = T.alloc_local((turns * 8,), BF16)
            column = T.alloc_local((8,), F32)
            bias_s = T.alloc_shared((2, rows, N + 4), F32)
            for e in T.vectorized(turns * 8):
                total[e] = 0.0
            for i in T.serial(per_group):
                h = (rg % G) * per_group + i
                for u in T.unroll(turns):
                    at = T.min(blk * HEAD_BLOCK + u * rows + tx // lanes, S - 1)
                    for e in T.vectorized(8):
                        one[u * 8 + e] = per_head[b, at, rg // G, h, tx % lanes * 8 + e]
                for e in T.unroll(8):
                    column[e] = 0.0
                for u in T.unroll(turns):
                    keep = T.if_then_else(blk * HEAD_BLOCK + u * rows + tx // lanes < S, 1.0, 0.0)
                    for e in T.unroll(8):
                        total[u * 8 + e] += f32(one[u * 8 + e])
                        column[e] += f32(one[u * 8 + e]) * keep
                for e in T.vectorized(4):
                    bias_s[i % 2, tx // lanes, tx % lanes * 8 + e] = column[e]
                for e in T.vectorized(4):
                    bias_s[i % 2, tx // lanes, tx % lanes * 8 + 4 + e] = column[4 + e]
                T.sync_threads()
                if tx < N:
                    p_bias[b, blk, h, rg // G, tx] = line_sum(bias_s, i % 2, tx, rows)
            for u in T.unroll(turns):
                if blk * HEAD_BLOCK + u * rows + tx // lanes < S:
                    for e in T.vectorized(8):
                        grouped[b, blk * HEAD_BLOCK + u * rows + tx // lanes, rg // G, rg % G, tx % lanes * 8 + e] = (
                            bf16(total[u * 8 + e])
                        )

    return b4_reduce_heads


def line_sum(tile: Any, which: Any, n: Any, rows: int) -> Any:
    """Return the sum of tile[which, :, n]."""
    total = tile[which, 0, n]
    for row in range(1, rows):
        total = total + tile[which, row, n]
    return total


def scalar_gradients(s: ScanShape, *, num_tokens: int, threads: int = 128) -> Any:
    """B5: dadt, ddt, dtrap fp32 [B,H,S] from the row sums; `edge` [B,H,K] is <E, H> at super-chunk ends.

    dadt is a reverse sum from an exact right edge; what it misses of the exact left edge is spread over the tokens.
    """
    B, S, H, L, K = s.B, s.S, s.H, s.L, s.K

    @T.prim_func
    def b5_scalar_gradients(
        dt: T.Tensor((B, H, S), F32),
        trap: T.Tensor((B, H, S), F32),
        reset: T.Tensor((B, S), "int32"),
        sk: T.Tensor((B, H, S), F32),
        row_q: T.Tensor((B, H, S), F32),
        row_k: T.Tensor((B, H, S), F32),
        same: T.Tensor((B, H, S), F32),
        diag: T.Tensor((B, H, S), F32),
        edge: T.Tensor((B, H, K), F32),
        dadt: T.Tensor((B, H, S), F32),
        ddt: T.Tensor((B, H, S), F32),
        dtrap: T.Tensor((B, H, S), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            sum_s = T.alloc_shared((L,), F32)
            for t in T.Parallel(L):
                at = sc * L + t
                sum_s[t] = T.if_then_else(at < num_tokens, row_q[b, h, at] - row_k[b, h, at], 0.0)
            T.cumsum(sum_s, dim=0, reverse=True)
            right = edge[b, h, sc]
            miss = T.if_then_else(sc > 0, edge[b, h, T.max(sc - 1, 0)], 0.0) - (sum_s[0] + right)
            for t in T.Parallel(L):
                at = sc * L + t
                if at < num_tokens:
                    first = reset[b, at] == 1
                    dadt[b, h, at] = T.if_then_else(first, 0.0, sum_s[t] + right + miss * (1.0 - t * (1.0 / L)))
                    scale = sk[b, h, at]
                    ds = T.if_then_else(scale > 0.0, (row_k[b, h, at] - diag[b, h, at]) / scale, 0.0)
                    before = T.max(at - 1, 0)
                    looked = T.if_then_else(
                        (at > 0) & (reset[b, at] == 0) & (sk[b, h, before] > 0.0),
                        (row_k[b, h, before] - diag[b, h, before]) / sk[b, h, before],
                        0.0,
                    )
                    mix = T.sigmoid(trap[b, h, at])
                    d_gamma = ds + same[b, h, at]
                    ddt[b, h, at] = mix * d_gamma + (1.0 - mix) * looked
                    dtrap[b, h, at] = mix * (1.0 - mix) * dt[b, h, at] * (d_gamma - looked)

    return b5_scalar_gradients


def edges(s: ScanShape, *, threads: int = 128) -> Any:
    """B6a: what the gradients of decay and angle sum to beyond every super-chunk, from the states at its end.

    With E [B,H,K,N,P] and H (`start` of the next super-chunk): decay [B,H,K] = <E, H>; angle [B,H,K,A] = sum over p of
    E[j] H[N/2 + j] - E[N/2 + j] H[j], the turn of everything later against everything earlier. Exact in float32 where
    adding up rounded per-token gradients over the whole sequence is not.
    """
    B, H, N, P, A, K = s.B, s.H, s.N, s.P, s.A, s.K

    @T.prim_func
    def b6_edges(
        leaving: T.Tensor((B, H, K, N, P), F32),
        start: T.Tensor((B, H, K, N, P), F32),
        decay: T.Tensor((B, H, K), F32),
        angle: T.Tensor((B, H, K, A), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            product = T.alloc_fragment((N, P), F32)
            crossed = T.alloc_fragment((A, P), F32)
            row = T.alloc_fragment((N,), F32)
            total = T.alloc_fragment((1,), F32)
            turned = T.alloc_fragment((A,), F32)
            after = T.min(sc + 1, K - 1)
            for n, p in T.Parallel(N, P):
                product[n, p] = leaving[b, h, sc, n, p] * start[b, h, after, n, p]
            T.reduce_sum(product, row, dim=1)
            T.reduce_sum(row, total, dim=0)
            for one in T.Parallel(1):
                decay[b, h, sc] = total[one]
            for j, p in T.Parallel(A, P):
                crossed[j, p] = (
                    leaving[b, h, sc, j, p] * start[b, h, after, N // 2 + j, p]
                    - leaving[b, h, sc, N // 2 + j, p] * start[b, h, after, j, p]
                )
            T.reduce_sum(crossed, turned, dim=1)
            T.copy(turned, angle[b, h, sc, :])

    return b6_edges


def angle_gradients(s: ScanShape, *, threads: int = 128) -> Any:
    """B6b: raw angle gradients fp32 [B,S,H,A] and their part of ddt (added in place).

    `after` [B,H,K,A] is the sum of dtheta over all later super-chunks, from `edges`.
    """
    B, S, H, A, L, K = s.B, s.S, s.H, s.A, s.L, s.K
    run, parts = L * A // threads, threads // A

    @T.prim_func
    def b6_angle_gradients(
        angles: T.Tensor((B, S, H, A), F32),
        dt: T.Tensor((B, H, S), F32),
        dtheta: T.Tensor((B, H, S, A), F32),
        after: T.Tensor((B, H, K, A), F32),
        dangles: T.Tensor((B, S, H, A), F32),
        ddt: T.Tensor((B, H, S), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            # thread: one angle, `run` consecutive tokens
            tx = T.get_thread_binding()
            j = tx % A
            part = tx // A
            rest = T.alloc_local((run,), F32)
            sums = T.alloc_local((2,), F32)
            total_s = T.alloc_shared((parts, A), F32)
            sums[0] = 0.0
            for i in T.unroll(run):
                at = T.min(sc * L + part * run + i, S - 1)
                rest[i] = T.if_then_else(sc * L + part * run + i < S, dtheta[b, h, at, j], 0.0)
                sums[0] += rest[i]
            total_s[part, j] = sums[0]
            T.sync_threads()
            sums[0] = after[b, h, sc, j]
            sums[1] = 0.0
            for i in T.serial(parts):
                sums[1] += total_s[i, j]
                if i > part:
                    sums[0] += total_s[i, j]
            left = T.if_then_else(sc > 0, after[b, h, T.max(sc - 1, 0), j], 0.0)
            miss = left - (sums[1] + after[b, h, sc, j])
            for back in T.unroll(run):
                i = run - 1 - back
                t = part * run + i
                at = T.min(sc * L + t, S - 1)
                sums[0] += rest[i]
                bent = tanh(angles[b, at, h, j])
                turned = (sums[0] + miss * (1.0 - t * (1.0 / L))) * math.pi
                if sc * L + t < S:
                    dangles[b, at, h, j] = turned * dt[b, h, at] * (1.0 - bent * bent)
                rest[i] = turned * bent
                for lanes in (1, 2, 4, 8, 16):
                    if lanes < A:
                        rest[i] += T.shfl_xor(rest[i], lanes)
                if (j == 0) & (sc * L + t < S):
                    ddt[b, h, sc * L + t] += rest[i]

    return b6_angle_gradients
