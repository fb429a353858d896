"""Spans: the documents' parts of a block of EDGE tokens, and sums of per-token values that stop where a document ends.

The gradients of decay and angle at a token are sums over the rest of its document. Over a whole document they are zero,
but rounded values sum to noise instead, large beside the gradients of the last tokens before: so no sum goes on into
the next document. What the values of a span must sum to is known, at the start of the block from its edge and at a
document's start to be zero: what they miss is spread over the span. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0912

from types import SimpleNamespace
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.forward.prefix import Lanes
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces.positions import EDGE, inside, token
from kernels.mamba3_mimo.cuda.pieces.tiles import F32, f32


def spans_of(alloc: Any, tokens: int) -> SimpleNamespace:
    """Return buffers for the spans of `tokens` tokens: see `make_spans`."""
    return SimpleNamespace(begin=alloc((tokens,), "int32"), end=alloc((tokens,), "int32"), share=alloc((tokens,), F32))


def make_spans(s: ScanShape) -> Any:
    """Return the macro of one warp that finds the spans of tokens 2 * lane and 2 * lane + 1 of block `blk`.

    Each result has two values, one per token. span.begin: the first token of its span; span.end: that of the next span;
    span.share: which part of its span lies from the token on. Padding is a span of its own.
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

    Lane `lane` has `width` values of each of lanes.run tokens in a row, own [run * width]; lanes that are lanes.groups
    apart have the same values of other tokens. `span` is that of the lane's tokens, see `make_spans`; of span.begin
    only the first is read. `left` and `right` [width] are the exact sums from the block's first token on and from the
    next block's; `left` is overwritten.
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
        # on into the lanes behind, as far as the last token's span goes
        for e in T.unroll(width):
            near[0] = T.shfl_down(later[e], groups)
            later[e] = T.if_then_else(t0 + run < span.end[run - 1], near[0], 0.0)
        for i in T.unroll(run):
            for e in T.unroll(width):
                own[i * width + e] += T.if_then_else(t0 + run <= span.end[i], later[e], 0.0)
        # what is missed from the start of a span on: the lanes behind ask the one where their span starts
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
