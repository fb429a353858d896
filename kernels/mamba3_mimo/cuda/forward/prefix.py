"""Prefix kernels F0: values that depend only on time, computed once per scan instead of once per pass.

Outputs per head and token:

- cos and sin of the cumulated angle (float16)
- `lc`, the in-chunk cumulated decay in log2
- `sk` = gamma + sigma, and `gm` = gamma
- `wk`, sk times the decay from the token to the end of its super-chunk
- `wq`, the decay from the start of the super-chunk to the token
- `carry`, the decay of the whole super-chunk

A document start adds -92 to the log2 decay, so everything before it vanishes (2**-92). Letters: see shape.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0917

import math
from typing import Any, NamedTuple

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.pieces.positions import BLOCK, EDGE, blocks_of
from ablate.kernels.mamba3_mimo.cuda.pieces.scalar import LOG2E, tanh, wrapped
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import F16, F32
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

RESET = -92.0
THREADS = 128
AHEAD = 8
"""Sums of earlier blocks that a thread of `tables` loads at a time."""


class Lanes(NamedTuple):
    """Distribution of EDGE tokens with `width` angles over a warp: 8 adjacent angles of `run` adjacent tokens per lane.

    Lane: part * groups + group. More than `width` angles take several rounds.
    """

    groups: int
    """Groups of 8 angles."""
    parts: int
    """Runs of tokens."""
    run: int
    """Tokens of one lane."""
    rounds: int
    """Groups of `width` angles."""

    @property
    def width(self) -> int:
        """Angles of one round."""
        return 8 * self.groups

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the distances, in parts, of a scan over the parts."""
        return tuple(1 << i for i in range(self.parts.bit_length() - 1))


def lanes_for(s: ScanShape, most: int = 32) -> Lanes:
    """Return the distribution of the angles of `s`, at most `most` per round."""
    groups = min(s.A, most) // 8
    return Lanes(groups, 32 // groups, EDGE * groups // 32, s.A // (8 * groups))


def make_steps(s: ScanShape, lanes: Lanes) -> Any:
    """Return macro(step [8*run], angles [B,S,heads,A], dt [B,H,S], b, h, t0, j0): pi * tanh(angle) * dt from t0 on.

    The step of tokens behind the sequence is 0.
    """
    S, heads, run = s.S, s.angle_heads, lanes.run

    @T.macro
    def steps(step, angles, dt, b, h, t0, j0):
        for i in T.unroll(run):
            at = T.min(t0 + i, S - 1)
            for half in (0, 4):
                for e in T.vectorized(4):
                    step[i * 8 + half + e] = angles[b, at, h % heads, j0 + half + e]
            size = T.if_then_else(t0 + i < S, dt[b, h, at] * math.pi, 0.0)
            for e in T.unroll(8):
                step[i * 8 + e] = tanh(step[i * 8 + e]) * size

    return steps


def angle_sums(s: ScanShape) -> Any:
    """F0a: sum of the angle steps pi * tanh(angle) * dt over every BLOCK tokens, fp32 [B,H,ceil(S/BLOCK),A].

    The raw angles are [B,S,heads,A], with heads = 1 if all heads share them.
    """
    B, H, A, blocks, lanes = s.B, s.H, s.A, blocks_of(s), lanes_for(s)
    steps = make_steps(s, lanes)

    @T.prim_func
    @takes(s)
    def f0_angle_sums(angles, dt, sums):
        with T.Kernel(H, blocks, B, threads=THREADS) as (h, blk, b):
            step, total = T.alloc_local((8 * lanes.run,), F32), T.alloc_local((8,), F32)
            total_s = T.alloc_shared((THREADS // 32, A), F32)
            tx = T.get_thread_binding()
            lane = tx % 32
            for turns in T.serial(lanes.rounds):
                j0 = turns * lanes.width + lane % lanes.groups * 8
                t0 = blk * BLOCK + tx // 32 * EDGE + lane // lanes.groups * lanes.run
                steps(step, angles, dt, b, h, t0, j0)
                for e in T.unroll(8):
                    total[e] = step[e]
                for i in T.unroll(1, lanes.run):
                    for e in T.unroll(8):
                        total[e] += step[i * 8 + e]
                for far in lanes.steps:
                    for e in T.unroll(8):
                        total[e] += T.shfl_xor(total[e], far * lanes.groups)
                if lane < lanes.groups:
                    for e in T.unroll(8):
                        total_s[tx // 32, j0 + e] = total[e]
            T.sync_threads()
            if tx < A:
                sums[b, h, blk, tx] = wrapped(total_s[0, tx] + total_s[1, tx] + total_s[2, tx] + total_s[3, tx])

    return f0_angle_sums


def make_staged(s: ScanShape, lanes: Lanes) -> tuple[Any, Any]:
    """Return the macros (put(values, t, row), write(cs, b, h, t0, j0, tx)) of one round of `tables`.

    A chunk's table of some angles is contiguous memory, but a lane computes scattered parts of 16 bytes. So rows of 8
    sines or cosines are collected in shared memory and written as contiguous parts.
    """
    S, C = s.S, s.C
    rows = lanes.width // 4
    stage_s = T.alloc_shared((BLOCK * rows, 8), F16)

    def place(slot: Any) -> Any:  # avoids bank conflicts between the lanes of a store
        return slot ^ ((slot >> 3 ^ slot >> 5) & 7)

    @T.macro
    def put(values, t, row):
        for e in T.vectorized(8):
            stage_s[place((t // C * rows + row) * C + t % C), e] = values[e]

    @T.macro
    def write(cs, b, h, t0, j0, tx):
        for turn in T.unroll(BLOCK * rows // THREADS):
            slot = turn * THREADS + tx
            t = t0 + slot // (rows * C) * C
            if t < S:
                walk, at = s.place(b, t)
                for e in T.vectorized(8):
                    cs[walk, h, at // C, j0 // 4 + slot // C % rows, slot % C, e] = stage_s[place(slot), e]

    return put, write


def tables(s: ScanShape) -> Any:
    """F0b: cos and sin table [B*K,H,L/C,A/4,C,8] fp16: cos of 8 angles, then sin of the same angles.

    `sums` is the output of `angle_sums`. A block adds up the sums of the blocks before it.
    """
    B, H, A, blocks = s.B, s.H, s.A, blocks_of(s)
    lanes, parts = lanes_for(s, 16), THREADS // s.A  # more at once would take the registers of other blocks
    steps = make_steps(s, lanes)

    @T.prim_func
    @takes(s)
    def f0_tables(angles, dt, sums, cs):
        with T.Kernel(H, blocks, B, threads=THREADS) as (h, blk, b):
            step = T.alloc_local((8 * lanes.run,), F32)
            theta, near = T.alloc_local((8,), F32), T.alloc_local((8,), F32)
            cos, sin, before = T.alloc_local((8,), F16), T.alloc_local((8,), F16), T.alloc_local((1,), F32)
            before_s, total_s = T.alloc_shared((parts, A), F32), T.alloc_shared((THREADS // 32, A), F32)
            put, write = make_staged(s, lanes)
            tx = T.get_thread_binding()
            warp, lane = tx // 32, tx % 32
            before[0] = 0.0
            for i in T.serial(T.ceildiv(blk, parts * AHEAD)):
                for u in T.unroll(AHEAD):
                    at = (i * AHEAD + u) * parts + tx // A
                    step[u] = T.if_then_else(at < blk, sums[b, h, T.min(at, blocks - 1), tx % A], 0.0)
                for u in T.unroll(AHEAD):
                    before[0] = wrapped(before[0] + step[u])
            before_s[tx // A, tx % A] = before[0]
            for turns in T.serial(lanes.rounds):
                j0 = turns * lanes.width + lane % lanes.groups * 8
                t0 = blk * BLOCK + warp * EDGE + lane // lanes.groups * lanes.run
                steps(step, angles, dt, b, h, t0, j0)
                for e in T.unroll(8):
                    theta[e] = step[e]
                for i in T.unroll(1, lanes.run):
                    for e in T.unroll(8):
                        theta[e] += step[i * 8 + e]
                for e in T.unroll(8):
                    near[e] = theta[e]
                for far in lanes.steps:
                    for e in T.unroll(8):
                        before[0] = T.shfl_up(theta[e], far * lanes.groups)
                        theta[e] += T.if_then_else(lane >= far * lanes.groups, before[0], 0.0)
                if lane >= 32 - lanes.groups:
                    for e in T.unroll(8):
                        total_s[warp, j0 + e] = theta[e]
                T.sync_threads()
                for e in T.unroll(8):
                    theta[e] -= near[e]
                for i in T.serial(parts):
                    for e in T.unroll(8):
                        theta[e] += before_s[i, j0 + e]
                for i in T.serial(warp):
                    for e in T.unroll(8):
                        theta[e] += total_s[i, j0 + e]
                for i in T.unroll(lanes.run):
                    for e in T.unroll(8):
                        theta[e] = wrapped(theta[e] + step[i * 8 + e])
                        cos[e] = T.Cast(F16, T.cos(theta[e]))
                        sin[e] = T.Cast(F16, T.sin(theta[e]))
                    put(cos, t0 - blk * BLOCK + i, lane % lanes.groups * 2)
                    put(sin, t0 - blk * BLOCK + i, lane % lanes.groups * 2 + 1)
                T.sync_threads()
                write(cs, b, h, blk * BLOCK, turns * lanes.width, tx)

    return f0_tables


def decays(s: ScanShape, v: Variant) -> Any:
    """F0c: scalars of every token from adt, dt, trap fp32 [B,H,S] and reset int32 [B,S], 1 at document starts.

    `num_tokens` <= S is the true length. Later tokens get sk = gm = wk = 0 and no decay. The outputs are [B*K,H,L],
    carry [B*K,H]. Only a chunk_parallel schedule has wk, wq and carry.
    """
    B, S, H, C = s.B, s.S, s.H, s.C
    parallel = v.schedule == "chunk_parallel"
    block = s.L if parallel else BLOCK
    NC = block // C

    @T.prim_func
    @takes(s, v)
    def f0_decays(adt, dt, trap, reset, lc, sk, gm, wk, wq, carry, num_tokens: T.int32):
        with T.Kernel(H, (S + block - 1) // block, B, threads=THREADS) as (h, blk, b):
            log_s = T.alloc_shared((NC, C), F32)
            scale_s = T.alloc_shared((NC, C), F32)
            left_s = T.alloc_shared((NC,), F32)
            right_s = T.alloc_shared((NC,), F32)
            for n, c in T.Parallel(NC, C):
                at = blk * block + n * C + c
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
                    walk, t = s.place(b, at)
                    gm[walk, h, t] = gamma
            T.cumsum(log_s, dim=1)
            if parallel:
                for n in T.Parallel(NC):
                    left_s[n] = log_s[n, C - 1]
                    right_s[n] = log_s[n, C - 1]
                T.cumsum(left_s, dim=0)
                T.cumsum(right_s, dim=0, reverse=True)
            for n, c in T.Parallel(NC, C):
                at = blk * block + n * C + c
                if at < S:
                    walk, t = s.place(b, at)
                    lc[walk, h, t] = log_s[n, c]
                    sk[walk, h, t] = scale_s[n, c]
                    if parallel:
                        wq[walk, h, t] = T.exp2(left_s[n] - log_s[n, C - 1] + log_s[n, c])
                        wk[walk, h, t] = scale_s[n, c] * T.exp2(right_s[n] - log_s[n, c])
            if parallel:
                for n in T.Parallel(1):
                    carry[b * s.K + blk, h] = T.exp2(right_s[n])

    return f0_decays
