"""Prefix kernels: everything that depends on time alone, computed once per scan instead of once per pass.

Outputs per head and token: cos and sin of the cumulated angle (float16), `lc` the in-chunk cumulated decay in log2,
`sk` = gamma + sigma, `gm` = gamma, `wk` = sk times the decay from the token to the end of its super-chunk, `wq` the
decay from the start of the super-chunk to the token, and per super-chunk `carry`, the decay of all of it. A document
start adds -92 to the log2 decay, which makes everything before it vanish (2**-92). Letters: see shape.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: N812, PLR0913, PLR0917
# mypy: ignore-errors

import math
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.shape import ScanShape
from kernels.mamba3_mimo.cuda.tiles import F16, F32

LOG2E = math.log2(math.e)
RESET = -92.0
TAU = 2 * math.pi


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent with an absolute error near 1e-7: angles add up over the sequence."""
    return 1.0 - 2.0 / (1.0 + T.exp2(x * (2 * LOG2E)))


def turn(x: Any) -> Any:
    """Return x reduced to [-pi, pi]."""
    return x - T.floor(x * (1 / TAU) + 0.5) * TAU


def angle_sums(s: ScanShape, *, threads: int = 128) -> Any:
    """F0a: sum of the angle steps pi * tanh(angle) * dt over every super-chunk, fp32 [B,H,K,A]."""
    B, S, H, A, L, K = s.B, s.S, s.H, s.A, s.L, s.K

    @T.prim_func
    def f0_angle_sums(
        angles: T.Tensor((B, S, H, A), F32),
        dt: T.Tensor((B, H, S), F32),
        sums: T.Tensor((B, H, K, A), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            step = T.alloc_fragment((L, A), F32)
            total = T.alloc_fragment((A,), F32)
            for t, j in T.Parallel(L, A):
                at = sc * L + t
                step[t, j] = T.if_then_else(at < S, tanh(angles[b, at, h, j]) * dt[b, h, at] * math.pi, 0.0)
            T.reduce_sum(step, total, dim=0)
            for j in T.Parallel(A):
                sums[b, h, sc, j] = turn(total[j])

    return f0_angle_sums


def tables(s: ScanShape, *, threads: int = 128) -> Any:
    """F0b: cos and sin table [B,H,S/C,A/4,C,8] fp16, 8 angles of cos then the same of sin.

    `before` [B,H,K,A] is the angle at the start of each super-chunk.
    """
    B, S, H, A, C, L, K = s.B, s.S, s.H, s.A, s.C, s.L, s.K
    run, parts = L * A // threads, threads // A

    @T.prim_func
    def f0_tables(
        angles: T.Tensor((B, S, H, A), F32),
        dt: T.Tensor((B, H, S), F32),
        before: T.Tensor((B, H, K, A), F32),
        cs: T.Tensor((B, H, S // C, A // 4, C, 8), F16),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            # thread: one angle, `run` consecutive tokens
            tx = T.get_thread_binding()
            j = tx % A
            part = tx // A
            step = T.alloc_local((run,), F32)
            theta = T.alloc_local((1,), F32)
            total_s = T.alloc_shared((parts, A), F32)
            theta[0] = 0.0
            for i in T.unroll(run):
                at = T.min(sc * L + part * run + i, S - 1)
                step[i] = tanh(angles[b, at, h, j]) * dt[b, h, at] * math.pi
                theta[0] += step[i]
            total_s[part, j] = theta[0]
            T.sync_threads()
            theta[0] = before[b, h, sc, j]
            for i in T.serial(part):
                theta[0] += total_s[i, j]
            for i in T.unroll(run):
                t = part * run + i
                theta[0] = turn(theta[0] + step[i])
                if sc * L + t < S:
                    cs[b, h, sc * (L // C) + t // C, j // 8 * 2, t % C, j % 8] = T.Cast(F16, T.cos(theta[0]))
                    cs[b, h, sc * (L // C) + t // C, j // 8 * 2 + 1, t % C, j % 8] = T.Cast(F16, T.sin(theta[0]))

    return f0_tables


def decays(s: ScanShape, *, num_tokens: int, threads: int = 128) -> Any:
    """F0c: the scalars of every token. adt, dt, trap fp32 [B,H,S]; reset int32 [B,S], 1 at document starts.

    `num_tokens` <= S is the true length: rows beyond it get sk = gm = wk = 0 and no decay.
    """
    B, S, H, C, L, K, NC = s.B, s.S, s.H, s.C, s.L, s.K, s.NC

    @T.prim_func
    def f0_decays(
        adt: T.Tensor((B, H, S), F32),
        dt: T.Tensor((B, H, S), F32),
        trap: T.Tensor((B, H, S), F32),
        reset: T.Tensor((B, S), "int32"),
        lc: T.Tensor((B, H, S), F32),
        sk: T.Tensor((B, H, S), F32),
        gm: T.Tensor((B, H, S), F32),
        wk: T.Tensor((B, H, S), F32),
        wq: T.Tensor((B, H, S), F32),
        carry: T.Tensor((B, H, K), F32),
    ):
        with T.Kernel(H, K, B, threads=threads) as (h, sc, b):
            log_s = T.alloc_shared((NC, C), F32)
            scale_s = T.alloc_shared((NC, C), F32)
            left_s = T.alloc_shared((NC,), F32)
            right_s = T.alloc_shared((NC,), F32)
            for n, c in T.Parallel(NC, C):
                at = sc * L + n * C + c
                log_s[n, c] = T.if_then_else(
                    at < num_tokens, adt[b, h, at] * LOG2E + T.Cast(F32, reset[b, at]) * RESET, 0.0
                )
                gamma = T.if_then_else(at < num_tokens, dt[b, h, at] * T.sigmoid(trap[b, h, at]), 0.0)
                sigma = T.if_then_else(
                    at + 1 < num_tokens,
                    dt[b, h, at + 1] * T.sigmoid(-trap[b, h, at + 1]) * T.Cast(F32, 1 - reset[b, at + 1]),
                    0.0,
                )
                scale_s[n, c] = gamma + sigma
                if at < S:
                    gm[b, h, at] = gamma
            T.cumsum(log_s, dim=1)
            for n in T.Parallel(NC):
                left_s[n] = log_s[n, C - 1]
                right_s[n] = log_s[n, C - 1]
            T.cumsum(left_s, dim=0)
            T.cumsum(right_s, dim=0, reverse=True)
            for n, c in T.Parallel(NC, C):
                at = sc * L + n * C + c
                if at < S:
                    lc[b, h, at] = log_s[n, c]
                    sk[b, h, at] = scale_s[n, c]
                    wq[b, h, at] = T.exp2(left_s[n] - log_s[n, C - 1] + log_s[n, c])
                    wk[b, h, at] = scale_s[n, c] * T.exp2(right_s[n] - log_s[n, c])
            for n in T.Parallel(1):
                carry[b, h, sc] = T.exp2(right_s[n])

    return f0_decays
