"""Small kernels after the walk: heads into groups, biases, and the gradients of the scalars. Letters: see shape.py."""

import math
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo_cuda.prefix import tanh
from kernels.mamba3_mimo_cuda.shape import ScanShape
from kernels.mamba3_mimo_cuda.tiles import BF16, F32, bf16, f32


def reduce_heads(s: ScanShape, *, threads: int = 128, tokens: int = 64) -> Any:
    """B4: sum per-head dq or dk [B,S,R,H,N] bf16 over the heads of a group -> [B,S,R,G,N] bf16.

    Also `p_bias` fp32 [B,S/tokens,H,R,N]: the sum over the block's tokens, per head.
    """
    B, S, H, G, N, R = s.B, s.S, s.H, s.G, s.N, s.R
    per_group, blocks = s.heads_per_group, -(-s.S // tokens)

    @T.prim_func
    def b4_reduce_heads(
        per_head: T.Tensor((B, S, R, H, N), BF16),
        grouped: T.Tensor((B, S, R, G, N), BF16),
        p_bias: T.Tensor((B, blocks, H, R, N), F32),
    ):
        with T.Kernel(blocks, R * G, B, threads=threads) as (blk, rg, b):
            total = T.alloc_fragment((tokens, N), F32)
            one = T.alloc_fragment((tokens, N), F32)
            column = T.alloc_fragment((N,), F32)
            T.clear(total)
            for i in T.serial(per_group):
                h = (rg % G) * per_group + i
                for t, n in T.Parallel(tokens, N):
                    at = blk * tokens + t
                    one[t, n] = T.if_then_else(at < S, f32(per_head[b, at, rg // G, h, n]), 0.0)
                    total[t, n] += one[t, n]
                T.reduce_sum(one, column, dim=0)
                T.copy(column, p_bias[b, blk, h, rg // G, :])
            for t, n in T.Parallel(tokens, N):
                if blk * tokens + t < S:
                    grouped[b, blk * tokens + t, rg // G, rg % G, n] = bf16(total[t, n])

    return b4_reduce_heads


def scalar_gradients(s: ScanShape, *, num_tokens: int, threads: int = 128) -> Any:
    """B5: dadt, ddt, dtrap fp32 [B,H,S] from the row sums; `edge` [B,H,K] is <E, H> at super-chunk ends.

    dadt is a reverse sum from an exact right edge; what it misses of the exact left edge is spread over the tokens.
    """
    B, S, H, C, L, K = s.B, s.S, s.H, s.C, s.L, s.K

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
            rest_s = T.alloc_shared((L, A), F32)
            part = T.alloc_fragment((L, A), F32)
            total = T.alloc_fragment((L,), F32)
            for t, j in T.Parallel(L, A):
                rest_s[t, j] = T.if_then_else(sc * L + t < S, dtheta[b, h, sc * L + t, j], 0.0)
            T.cumsum(rest_s, dim=0, reverse=True)
            for t, j in T.Parallel(L, A):
                at = T.min(sc * L + t, S - 1)
                right = after[b, h, sc, j]
                left = T.if_then_else(sc > 0, after[b, h, T.max(sc - 1, 0), j], 0.0)
                miss = left - (rest_s[0, j] + right)
                rest = (rest_s[t, j] + right + miss * (1.0 - t * (1.0 / L))) * math.pi
                bent = tanh(angles[b, at, h, j])
                part[t, j] = rest * bent
                if sc * L + t < S:
                    dangles[b, at, h, j] = rest * dt[b, h, at] * (1.0 - bent * bent)
            T.reduce_sum(part, total, dim=1)
            for t in T.Parallel(L):
                if sc * L + t < S:
                    ddt[b, h, sc * L + t] += total[t]

    return b6_angle_gradients
