"""B5: gradients of decay, step size, mix and raw angles from the outputs of the backward walk. Letters: see shape.py.

The gradients of decay and angle at a token are sums over the rest of its document. A span is the part of a document in
a block of EDGE tokens. Over a whole document the values sum to zero, but the rounded values sum to noise that is large
beside the gradients of the preceding tokens. So no sum continues into the next document. The sum of a span is known:
at the start of the block it follows from the edge, and at a document's start it is zero. The difference is distributed
over the span.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

import math
from types import SimpleNamespace
from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from ablate.kernels.mamba3_mimo.cuda.backward.reductions import THREADS
from ablate.kernels.mamba3_mimo.cuda.forward.prefix import Lanes, lanes_for
from ablate.kernels.mamba3_mimo.cuda.pieces import scalar
from ablate.kernels.mamba3_mimo.cuda.pieces.positions import (
    EDGE,
    edge_place,
    inside,
    of_head,
    place_before,
    token,
    walk_place,
    whole,
)
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import F32, f32
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape


def spans_of(alloc: Any, tokens: int) -> SimpleNamespace:
    """Return buffers for the spans of `tokens` tokens, see `make_spans`."""
    return SimpleNamespace(begin=alloc((tokens,), "int32"), end=alloc((tokens,), "int32"), share=alloc((tokens,), F32))


def make_spans(s: ScanShape) -> Any:
    """Return the macro of one warp that finds the spans of tokens 2 * lane and 2 * lane + 1 of block `blk`.

    Each result has one value per token. span.begin: first token of its span. span.end: first token of the next span.
    span.share: the share of its span from the token on. Padding is a span of its own.
    """

    @T.macro
    def spans(span, reset, num_tokens, b, blk, lane):
        starts, near = T.alloc_local((2,), "int32"), T.alloc_local((2,), "int32")
        t = 2 * lane
        for i in T.unroll(2):
            at = blk * EDGE + t + i
            starts[i] = T.if_then_else((t + i == 0) | (at == num_tokens), 1, reset[token(s, b, inside(s, at))])
        span.begin[1] = T.if_then_else(starts[1] == 1, t + 1, T.if_then_else(starts[0] == 1, t, 0))
        span.end[0] = T.if_then_else(starts[0] == 1, t, T.if_then_else(starts[1] == 1, t + 1, EDGE))
        for far in (1, 2, 4, 8, 16):
            near[0] = T.shfl_up(span.begin[1], far)
            near[1] = T.shfl_down(span.end[0], far)
            span.begin[1] = T.max(span.begin[1], near[0])
            span.end[0] = T.min(span.end[0], near[1])
        near[0] = T.shfl_up(span.begin[1], 1)
        near[1] = T.shfl_down(span.end[0], 1)
        span.begin[0] = T.if_then_else(starts[0] == 1, t, near[0])
        span.end[1] = T.if_then_else(lane < 31, near[1], EDGE)
        span.end[0] = T.if_then_else(starts[1] == 1, t + 1, span.end[1])
        for i in T.unroll(2):
            span.share[i] = f32(span.end[i] - (t + i)) / f32(span.end[i] - span.begin[i])

    return spans


def make_sums(lanes: Lanes, width: int) -> Any:
    """Return the macro of one warp that turns values of EDGE tokens, in place, into their sums from each token on.

    Lane `lane` has `width` values of each of lanes.run adjacent tokens, own [run * width]. Lanes lanes.groups apart
    have the same values of other tokens. `span` describes the lane's tokens, see `make_spans`; only the first number of
    span.begin is read. `left` and `right` [width] are the exact sums from the first token of this block and of the next
    block on. `left` is overwritten.
    """
    run, groups, steps = lanes.run, lanes.groups, lanes.steps

    @T.macro
    def sums(own, left, right, span, lane):
        later, near = T.alloc_local((width,), F32), T.alloc_local((1,), F32)
        t0 = lane // groups * run
        for e in T.unroll(width):
            own[(run - 1) * width + e] += T.if_then_else(t0 + run == EDGE, right[e], 0.0)
        for back in T.unroll(1, run):
            i = run - 1 - back
            for e in T.unroll(width):
                own[i * width + e] += T.if_then_else(t0 + i + 1 < span.end[i], own[(i + 1) * width + e], 0.0)
        for e in T.unroll(width):
            later[e] = own[e]
        for far in steps:
            for e in T.unroll(width):
                near[0] = T.shfl_down(later[e], far * groups)
                later[e] += T.if_then_else(t0 + far * run < span.end[0], near[0], 0.0)
        # continue into the following lanes up to the end of the last token's span
        for e in T.unroll(width):
            near[0] = T.shfl_down(later[e], groups)
            later[e] = T.if_then_else(t0 + run < span.end[run - 1], near[0], 0.0)
        for i in T.unroll(run):
            for e in T.unroll(width):
                own[i * width + e] += T.if_then_else(t0 + run <= span.end[i], later[e], 0.0)
        # difference from the start of a span on, which later lanes read from the lane where their span starts
        for e in T.unroll(width):
            near[0] = own[e]
            for i in T.unroll(1, run):
                near[0] = T.if_then_else(span.end[i - 1] == t0 + i, own[i * width + e], near[0])
            near[0] = T.shfl_sync(near[0], span.begin[0] // run * groups + lane % groups)
            left[e] = T.if_then_else(span.begin[0] == 0, left[e], 0.0) - T.if_then_else(
                span.begin[0] == t0, own[e], near[0]
            )
        for i in T.unroll(run):
            for e in T.unroll(width):
                if i > 0:
                    left[e] = T.if_then_else(span.end[i - 1] == t0 + i, -own[i * width + e], left[e])
                own[i * width + e] += left[e] * span.share[i]

    return sums


PAIRS = Lanes(groups=1, parts=32, run=2, rounds=1)
"""Distribution of the scalars of EDGE tokens over a warp."""


def time_gradients(s: ScanShape) -> Any:
    """B5: gradients of adt, dt, trap fp32 [B,H,S] and of the raw angles [B,S,heads,A] from the walk's sums.

    `sk`, `row_q`, `row_k`, `same`, `diag` [B*K,H,L], `dtheta` and `edges` come from the walk. `num_tokens` <= S is the
    true length. The gradients of a decay and of an angle are sums of per-token values from the token to the end of its
    document, corrected at every edge. The edge of the row's first token is read only if a state enters. Otherwise the
    sums from there on are zero. The sums behind the last token are zero too: the last token's own value already
    contains the addition of a final state, see host/final_state.py. The gradient of cumulated angles is dtheta, which
    this kernel does not touch.
    """
    B, S, H, A, heads, cumulated = s.B, s.S, s.H, s.A, s.angle_heads, s.cumulated
    warps, count = THREADS // 32, (s.S + EDGE - 1) // EDGE
    turns = -(-H // warps) if s.shared_angles else 1
    scalars, turned, stored = make_scalars(s), make_turned(s), make_stored(s)
    lanes, spans, head_of = lanes_for(s), make_spans(s), _heads(H, warps)

    @T.prim_func
    @takes(s)
    def b5_time_gradients(
        dt_, trap_, reset_, sk, row_q, row_k, same, diag, edges, angles_,
        dtheta: T.Tensor((s.walks, H, s.L, A), F32) if not cumulated else False,
        dadt_, ddt_, dtrap_, dangles_, num_tokens: T.int32,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(H, warps * turns), count, B, threads=THREADS) as (bh, blk, b):
            # every position below is within its tensor, but the compiler cannot see that with open sizes
            T.annotate_pass_configs({PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True})
            of_heads = (T.Tensor((B * H * S,), F32, t.data) for t in (dt_, trap_, dadt_, ddt_, dtrap_))
            dt, trap, dadt, ddt, dtrap = of_heads
            reset = T.Tensor((B * S,), "int32", reset_.data)
            if not cumulated:
                angles, dangles = (T.Tensor((B * S, heads, A), F32, t.data) for t in (angles_, dangles_))
            if lanes.run <= 4:  # otherwise the compiler takes more registers than so many blocks have
                T.annotate_min_blocks_per_sm(4 if s.shared_angles else 5)
            ddt_s = T.alloc_shared((warps * turns, EDGE), F32)
            sum_s = T.alloc_shared((warps, EDGE, lanes.width), F32)
            span_s = spans_of(T.alloc_shared, EDGE)
            total = T.alloc_local((8 * lanes.run,), F32)
            tx = T.get_thread_binding()
            warp, lane = tx // 32, tx % 32
            span = spans_of(T.alloc_local, 2)
            spans(span, reset, num_tokens, b, blk, lane)
            if not cumulated and tx < 32:
                for i in T.vectorized(2):
                    span_s.begin[2 * lane + i] = span.begin[i]
                for i in T.vectorized(2):
                    span_s.end[2 * lane + i] = span.end[i]
                for i in T.vectorized(2):
                    span_s.share[2 * lane + i] = span.share[i]
            # loops over the heads of this warp: unrolled they would take twice the registers
            for turn in T.unroll(turns, unroll_factor=1):
                at = turn * warps + warp
                h, has = head_of(bh * turns * warps + at)
                scalars(
                    dt, trap, reset, sk, row_q, row_k, same, diag, edges, dadt, dtrap, ddt_s, span, num_tokens,
                    b, h, has, blk, at, lane,
                )  # fmt: skip
            T.sync_threads()
            if not cumulated:
                for tile in T.serial(lanes.rounds):
                    for e in T.unroll(8 * lanes.run):
                        total[e] = 0.0
                    for turn in T.unroll(turns, unroll_factor=1):
                        at = turn * warps + warp
                        h, has = head_of(bh * turns * warps + at)
                        turned(
                            total, ddt_s, angles, dt, dtheta, edges, span_s, num_tokens, b, h, has, blk, tile, at, lane
                        )
                    stored(dangles, total, sum_s, b, bh * warps + warp, blk, tile, tx)
                T.sync_threads()
            for turn in T.unroll(turns, unroll_factor=1):
                at = turn * warps + warp
                h, has = head_of(bh * turns * warps + at)
                for i in T.unroll(2):
                    if has & (whole(s) | (blk * EDGE + i * 32 + lane < S)):
                        ddt[of_head(s, b, h, blk * EDGE + i * 32 + lane)] = ddt_s[at, i * 32 + lane]

    return b5_time_gradients


def _heads(heads: int, warps: int) -> Any:
    """Return the function from a warp's number among all blocks to (head, whether the head is its own).

    A warp behind the last head repeats that head's work and stores nothing. If it skipped the work, the compiler would
    move its shuffles out of the condition, and their loads would pass the tensors' ends.
    """
    if heads % warps == 0:
        return lambda number: (number, True)
    return lambda number: (T.min(number, heads - 1), number < heads)


def make_scalars(s: ScanShape) -> Any:
    """Return the macro of one warp for dadt and dtrap of EDGE tokens, and for ddt without the angles' share.

    Lane `lane` works on tokens 2 * lane and 2 * lane + 1. ddt goes to row `place` of ddt_s.
    """
    S, N, sums = s.S, s.N, make_sums(PAIRS, 1)

    @T.macro
    def scalars(
        dt, trap, reset, sk, row_q, row_k, same, diag, edges, dadt, dtrap, ddt_s, span, num_tokens,
        b, h, has, blk, place, lane,
    ):  # fmt: skip
        own, ds = T.alloc_local((2,), F32), T.alloc_local((3,), F32)
        left, right = T.alloc_local((1,), F32), T.alloc_local((1,), F32)
        t0 = blk * EDGE + 2 * lane
        for i in T.unroll(2):
            walk, t = walk_place(s, b, blk, 2 * lane + i)
            own[i] = T.if_then_else(t0 + i < num_tokens, row_q[walk, h, t] - row_k[walk, h, t], 0.0)
        left[0] = 0.0
        right[0] = 0.0
        for n in T.serial(T.ceildiv(N, 32)):
            if n * 32 + lane < N:
                if s.started or blk > 0:
                    walk, of = edge_place(s, b, blk)
                    left[0] += edges[walk, h, of, 0, n * 32 + lane]
                if (blk + 1) * EDGE < num_tokens:
                    walk, of = edge_place(s, b, blk + 1)
                    right[0] += edges[walk, h, of, 0, n * 32 + lane]
        for far in (1, 2, 4, 8, 16):
            left[0] += T.shfl_xor(left[0], far)
            right[0] += T.shfl_xor(right[0], far)
        sums(own, left, right, span, lane)
        for i in (0, 1, 2):
            # the previous token, which looks one token ahead, then both tokens
            walk, t = walk_place(s, b, blk, 2 * lane + i - 1) if i > 0 else place_before(s, b, blk, 2 * lane)
            ds[i] = T.if_then_else(
                (t0 + i > 0) & (sk[walk, h, t] > 0.0), (row_k[walk, h, t] - diag[walk, h, t]) / sk[walk, h, t], 0.0
            )
        for i in T.unroll(2):
            at = t0 + i
            if has & (whole(s) | (at < S)):
                first = reset[token(s, b, at)] == 1
                looked = T.if_then_else(first, 0.0, ds[i])
                mix = T.sigmoid(trap[of_head(s, b, h, at)])
                walk, t = walk_place(s, b, blk, 2 * lane + i)
                d_gamma = ds[i + 1] + same[walk, h, t]
                dadt[of_head(s, b, h, at)] = T.if_then_else(first | (at >= num_tokens), 0.0, own[i])
                dtrap[of_head(s, b, h, at)] = T.if_then_else(
                    at < num_tokens, scalar.d_trap(mix, dt[of_head(s, b, h, at)], d_gamma, looked), 0.0
                )
                ddt_s[place, 2 * lane + i] = T.if_then_else(at < num_tokens, scalar.d_dt(mix, d_gamma, looked), 0.0)

    return scalars


def make_at_edge(s: ScanShape) -> Any:
    """Return macro(out [8], edges, b, h, blk, j0): the sums of the gradients of 8 angles from edge `blk` on."""
    half_N = s.N // 2

    @T.macro
    def at_edge(out, edges, b, h, blk, j0):
        across = T.alloc_local((8,), F32)
        for half in (0, 4):
            walk, of = edge_place(s, b, blk)
            for e in T.vectorized(4):
                out[half + e] = edges[walk, h, of, 1, j0 + half + e]
            for e in T.vectorized(4):
                across[half + e] = edges[walk, h, of, 1, half_N + j0 + half + e]
        for e in T.unroll(8):
            out[e] -= across[e]

    return at_edge


def make_turned(s: ScanShape) -> Any:
    """Return the macro of one warp for EDGE tokens of one tile of angles. It adds to `total` and row `place` of ddt_s.

    `total` [8 * run] are the gradients of the lane's angles, see `Lanes` in prefix.py.
    """
    S, heads, lanes = s.S, s.angle_heads, lanes_for(s)
    run, groups, at_edge, sums = lanes.run, lanes.groups, make_at_edge(s), make_sums(lanes, 8)

    @T.macro
    def turned(total, ddt_s, angles, dt, dtheta, edges, span_s, num_tokens, b, h, has, blk, tile, place, lane):
        own, bent, part = T.alloc_local((8 * run,), F32), T.alloc_local((8,), F32), T.alloc_local((run,), F32)
        left, right, span = T.alloc_local((8,), F32), T.alloc_local((8,), F32), spans_of(T.alloc_local, run)
        t0 = lane // groups * run
        j0 = tile * lanes.width + lane % groups * 8
        for i in T.unroll(run):
            walk, t = walk_place(s, b, blk, t0 + i)
            for half in (0, 4):
                for e in T.vectorized(4):
                    own[i * 8 + half + e] = dtheta[walk, h, t, j0 + half + e]
        for i in T.unroll(run):
            for e in T.unroll(8):
                own[i * 8 + e] = T.if_then_else(whole(s) | (blk * EDGE + t0 + i < S), own[i * 8 + e], 0.0)
        for e in T.unroll(8):
            left[e] = 0.0
            right[e] = 0.0
        if s.started or blk > 0:
            at_edge(left, edges, b, h, blk, j0)
        if (blk + 1) * EDGE < num_tokens:
            at_edge(right, edges, b, h, blk + 1, j0)
        span.begin[0] = span_s.begin[t0]
        for i in T.vectorized(run):
            span.end[i] = span_s.end[t0 + i]
        for i in T.vectorized(run):
            span.share[i] = span_s.share[t0 + i]
        sums(own, left, right, span, lane)
        for i in T.unroll(run):
            at = inside(s, blk * EDGE + t0 + i)
            for half in (0, 4):
                for e in T.vectorized(4):
                    bent[half + e] = angles[token(s, b, at), h % heads, j0 + half + e]
            part[i] = 0.0
            for e in T.unroll(8):
                bent[e] = scalar.tanh(bent[e])
                own[i * 8 + e] *= math.pi
                of_angle = scalar.d_angle(own[i * 8 + e], dt[of_head(s, b, h, at)], bent[e])
                total[i * 8 + e] += of_angle if has is True else T.if_then_else(has, of_angle, 0.0)
                part[i] += own[i * 8 + e] * bent[e]
        for far in (1, 2):
            if far < groups:
                for i in T.unroll(run):
                    part[i] += T.shfl_xor(part[i], far)
        if lane % groups == 0:
            for i in T.unroll(run):
                ddt_s[place, t0 + i] += part[i]

    return turned


def make_stored(s: ScanShape) -> Any:
    """Return the macro of one block that writes `total` of every warp to dangles, or their sum for shared angles."""
    S, H, lanes = s.S, s.H, lanes_for(s)
    run, groups, width = lanes.run, lanes.groups, lanes.width

    @T.macro
    def stored(dangles, total, sum_s, b, h, blk, tile, tx):
        t0 = tx % 32 // groups * run
        j0 = tx % groups * 8
        if s.shared_angles:
            for i in T.unroll(run):
                for half in (0, 4):
                    for e in T.vectorized(4):
                        sum_s[tx // 32, t0 + i, j0 + half + e] = total[i * 8 + half + e]
            T.sync_threads()
            for u in T.unroll(EDGE * width // THREADS):
                t = (u * THREADS + tx) // width
                j = (u * THREADS + tx) % width
                if whole(s) | (blk * EDGE + t < S):
                    dangles[token(s, b, blk * EDGE + t), 0, tile * width + j] = (
                        sum_s[0, t, j] + sum_s[1, t, j] + sum_s[2, t, j] + sum_s[3, t, j]
                    )
            T.sync_threads()
        else:
            for i in T.unroll(run):
                if (whole(s) | (blk * EDGE + t0 + i < S)) & (h < H):
                    for e in T.vectorized(4):
                        dangles[token(s, b, blk * EDGE + t0 + i), h, tile * width + j0 + e] = total[i * 8 + e]
                    for e in T.vectorized(4):
                        dangles[token(s, b, blk * EDGE + t0 + i), h, tile * width + j0 + 4 + e] = total[i * 8 + 4 + e]

    return stored
