"""One chunk of B3 in the lifted form (lifted.py), from its loads to its stores. Letters: see shape.py.

`at` are the tiles, `mine` the registers, `by` the operands of products. The threads meet six times. Each of the four
parts states what must be complete before it.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations, bodies are long.
# ruff: noqa: N812, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward import gradients_io as io
from ablate.kernels.mamba3_mimo.cuda.backward import lifted, lifted_io
from ablate.kernels.mamba3_mimo.cuda.backward.groups import Written
from ablate.kernels.mamba3_mimo.cuda.backward.head_sums import make_keep
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import (
    WalkOperands,
    WalkRegisters,
    WalkTiles,
    panel_column,
    split_of,
)
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_steps import CopyPace, computing
from ablate.kernels.mamba3_mimo.cuda.pieces import scalar, tiles
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import Loads, make_store
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import end_batch, put, put_turned, take_turned
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16
from ablate.kernels.mamba3_mimo.cuda.shape import GROUP, LINE, ScanShape, Variant


@T.macro
def narrowed(out, values):
    """Round registers to bf16."""
    for c in T.unroll(out.shape[0] // 2):
        for e in T.vectorized(2):
            out[c * 2 + e] = bf16(values[c * 2 + e])


def make_chunk(
    s: ScanShape,
    v: Variant,
    loads: Loads,
    pace: CopyPace,
    written: Written,
    at: WalkTiles,
    mine: WalkRegisters,
    by: WalkOperands,
) -> Any:
    """Return macro(b, i, h, t0, n, tx): the gradients of step n, the chunk at token t0, for sum i over heads."""
    met = make_met(pace)
    before, outputs = make_turned(s, v, loads, pace, at, mine), make_outputs(s, loads, met, at, mine, by)
    entries = make_entries(s, v, loads, met, written, at, mine, by)
    inputs = make_inputs(s, v, loads, pace, written, at, mine, by)
    _, stored = make_store(v)

    @T.macro
    def chunk(b, i, h, t0, n, tx):
        pace.entered(n, tx)
        before(n, tx)
        outputs(n, tx)
        entries(b, h, t0, n, tx)
        inputs(b, i, h, t0, n, tx)
        if loads.ahead == 0:
            stored()
            pace.meet()

    return chunk


def make_met(pace: CopyPace) -> Any:
    """Return macro(): let the threads meet before products read their writes."""

    @T.macro
    def met():
        T.fence_proxy_async()
        pace.meet()

    return met


def make_turned(s: ScanShape, v: Variant, loads: Loads, pace: CopyPace, at: WalkTiles, mine: WalkRegisters) -> Any:
    """Return macro(n, tx): round E into e_s, wait for the copies, compute q~ and k~, load the thread's v, z and dO."""
    C, M, depth, (groups, blocks, parts, _) = s.C, s.M, s.A // 4, split_of(s)
    threads = groups * GROUP
    order = tiles.ColumnOrder(lambda group: panel_column(s, group), 32)
    angles, hold = tiles.make_angles(s, threads), tiles.make_bias(s, threads)
    rotation, columns = tiles.make_rotated(s, threads, loads.at, order), tiles.spread(s, threads).held
    (_, stored), met = make_store(v), make_met(pace)

    @T.macro
    def before(n, tx):
        held, one = loads.held_slot(n), loads.slot(n)
        narrowed(mine.wide, mine.E)
        put(at.e_s, mine.wide, 8, groups, tx, panel=64)
        loads.wait(at.bar, n, pace.steps, io.copies_of(s, v, loads))
        angles(mine.cos, mine.sin, at.cs_s, held * depth, tx)
        q, k, q_bias, k_bias = (T.alloc_local((columns,), BF16) for _ in range(4))
        rotation.fetch(k, at.k_raw, tx, n)  # all before the first write: the compiler may assume the same memory
        rotation.fetch(q, at.q_raw, tx, n)
        hold(k_bias, at.k_bias_s, 0, tx)
        hold(q_bias, at.q_bias_s, 0, tx)
        rotation.fetched(at.k_s, k, k_bias, mine.cos, mine.sin, tx)
        rotation.fetched(at.q_s, q, q_bias, mine.cos, mine.sin, tx)
        take_turned(mine.v, at.v_s, held * C, parts, groups, tx)
        if s.gated:
            take_turned(mine.z, at.z_s, one * C, parts, groups, tx)
        take_turned(mine.do, at.do_s, one * (C if s.reduced else M), parts if s.reduced else blocks, groups, tx)
        stored()  # of the previous chunk: dq_s, dk_s and v_s may change
        end_batch(0, mine.q_bias, mine.k_bias)
        met()

    return before


@T.macro
def by_columns(tile, scale):
    """Multiply registers of [64,64] by one number per column, which all ranks share."""
    for block in T.unroll(tile.shape[0] // 4):
        for lower in (0, 1):
            for e in T.unroll(2):
                tile[block * 4 + lower * 2 + e] *= scale[block % (scale.shape[0] // 2) * 2 + e]


def make_outputs(s: ScanShape, loads: Loads, met: Any, at: WalkTiles, mine: WalkRegisters, by: WalkOperands) -> Any:
    """Return macro(n, tx): the scores, y and, through the output gate, g. Needs: q~, k~, e_s of every thread."""
    C, M, N, (groups, blocks, parts, _) = s.C, s.M, s.N, split_of(s)
    alone, width = groups == 1, 64 // groups
    scales, scores = lifted.make_scales(s), lifted.make_scores(s)
    weights, spread, output_gate, _ = lifted.make_output_gate(s)

    @T.macro
    def outputs(n, tx):
        held, one = loads.held_slot(n), loads.slot(n)
        psi = T.alloc_local((2 * s.R,), F32)
        for lower in (0, 1):
            weights(psi, lower * s.R, at.psi_s, tx, lower)
        lifted.product(mine.score, by.q, by.k_rows, width, N, True)
        lifted.product(mine.y, by.h.moved(one * (N * LINE >> 4)), by.q_rows, width, N, True)
        spread(mine.gw, mine.v, psi)
        put_turned(at.x_s, 0, mine.gw, blocks, groups, tx)
        scales.pairs(mine.w, at.scalar_s, held * 3, tx)
        scales.reads(mine.scale, at.scalar_s, held * 3, tx)
        end_batch(1, mine.score)
        scores.own(mine.own, mine.score, tx)
        scores.weighted(mine.g, mine.score, mine.w, mine.skip[0], tx)
        put(at.mix_s, mine.g, blocks, groups, tx)
        if not alone:
            put_turned(at.mixt_s, 0, mine.g, blocks, groups, tx)
        end_batch(0, mine.y)
        by_columns(mine.y, mine.scale)
        met()
        lifted.product(mine.y, mine.gw if alone else by.xt, by.mix_rows, width, M, False)
        if not alone:  # there are enough registers here
            lifted.product(mine.dx, by.e, by.k_rows, width, N, True)
        end_batch(0 if alone else 1, mine.y, mine.gw)
        output_gate(mine, at, tx)
        put(at.g_s, mine.g, blocks, groups, tx)
        if at.gw_s is not None:
            put(at.gw_s, mine.gw, blocks, groups, tx)
        if s.gated:
            narrowed(mine.out, mine.ranks)
            put_turned(at.z_s, one * C, mine.out, parts, groups, tx)
        # loads the scales of the next products while this thread waits for the others
        mine.ends[0] = scalar.read_scale(at.scalar_s[held * 3, C - 1])
        scales.writes(mine.scale, at.scalar_s, held * 3, tx)
        met()

    return outputs


def make_entries(
    s: ScanShape,
    v: Variant,
    loads: Loads,
    met: Any,
    written: Written,
    at: WalkTiles,
    mine: WalkRegisters,
    by: WalkOperands,
) -> Any:
    """Return macro(b, h, t0, n, tx): E of the previous chunk, dx, weighted gradients of the scores, part of dq~.

    Needs: e_s, x_s, mix_s, g_s, z_s of every thread, and of this one the decay of E in `ends` and the scales of the
    writes in `scale`.
    """
    C, M, N, P, (groups, blocks, _, _) = s.C, s.M, s.N, s.P, split_of(s)
    alone, width = groups == 1, 64 // groups
    scales, scores = lifted.make_scales(s), lifted.make_scores(s)
    same_step, (edge, _) = lifted.make_same_step(s), lifted.make_edge(s)
    store, stored = make_store(v)

    @T.macro
    def entries(b, h, t0, n, tx):
        held, one = loads.held_slot(n), loads.slot(n)
        entering = one * (N * LINE >> 4)
        if alone:
            lifted.product(mine.dx, by.e, by.k_rows, width, N, True)
        lifted.product(mine.score, by.gt, by.x_rows, width, P, True)
        for c in T.unroll(32):
            mine.E[c] *= mine.ends[0]
        lifted.product(mine.E, mine.gw if at.gw_s is None else by.gw, by.q_states, 64, M, False)
        if s.gated:
            store(at.z_s[one * C : (one + 1) * C, :], written.dz[b, t0 : t0 + C, h, :])
        end_batch(2, mine.dx)
        by_columns(mine.dx, mine.scale)
        lifted.product(mine.dx, by.g, by.mixt_rows, width, M, False)
        end_batch(2, mine.score)
        scores.own(mine.d_own, mine.score, tx)
        scores.weighed(mine.left, mine.score, mine.w)
        if at.gw_s is not None:  # includes the decay, so the product needs no scaling
            lifted.product(mine.dn, by.gwt, by.h_states.moved(entering), 64, P, True)
        same_step(at, mine, held * 3, tx)
        put(at.dmix_s, mine.left, blocks, groups, tx)
        if at.gw_s is None:  # not earlier, for lack of registers
            lifted.product(mine.dn, by.gt, by.h_states.moved(entering), 64, P, True)
        end_batch(0, mine.dn, mine.E, mine.gw, mine.dx)
        if at.gw_s is None:
            scales.by_read(mine.dn, at.scalar_s, held * 3, tx)
        edge(mine.E, at.h_s, one * N, at.line_s, t0, tx)
        if loads.ahead > 0:
            stored()  # of dz: z_s may be loaded again
        met()

    return entries


def make_inputs(
    s: ScanShape,
    v: Variant,
    loads: Loads,
    pace: CopyPace,
    written: Written,
    at: WalkTiles,
    mine: WalkRegisters,
    by: WalkOperands,
) -> Any:
    """Return macro(b, i, h, t0, n, tx): the gradients of q, k and v, and all per-token numbers.

    Needs: dmix_s and line_s of every thread. Of the slots of chunk n only v and the angles may still be read.
    """
    C, M, P, depth, (groups, _, parts, _) = s.C, s.M, s.P, s.A // 4, split_of(s)
    scales, (*_, values) = lifted.make_scales(s), lifted.make_output_gate(s)
    turned_back, ranks, (_, edge_out) = lifted.make_turned_back(s), lifted.make_ranks(s), lifted.make_edge(s)
    rows, rows_out = lifted_io.make_rows_out(s, at, mine, written)
    turns, turns_out = lifted_io.make_turns_out(s, at, mine, written)
    (store, _), met, keep = make_store(v), make_met(pace), make_keep(s, v, computing(s))

    @T.macro
    def queries(b, h, t0, n, tx):
        held = loads.held_slot(n)
        lifted.product(mine.dn, mine.left if groups == 1 else by.dmix, by.k_states, 64, M, False)
        lifted.product(mine.dk, by.x, by.e_states, 64, P, True)
        pace.released(n, tx)
        edge_out(at.line_s, written.edges, b, h, t0, tx)
        for c in T.unroll(mine.turn.shape[0]):
            mine.turn[c] = 0.0
        end_batch(1, mine.dn, mine.left)
        turned_back(mine.dn, at.q_s, mine.turn, at.cs_s, held * depth, tx)
        narrowed(mine.wide, mine.dn)
        put(at.dq_s, mine.wide, 8, groups, tx)

    @T.macro
    def inputs(b, i, h, t0, n, tx):
        held = loads.held_slot(n)
        queries(b, h, t0, n, tx)
        end_batch(0, mine.dk)
        scales.by_write(mine.dk, at.scalar_s, held * 3, tx)
        lifted.product(mine.dk, by.dmixt, by.q_states, 64, M, False)
        values(mine, at, tx)
        narrowed(mine.out, mine.ranks)
        put_turned(at.v_s, held * C, mine.out, parts, groups, tx)
        rows(tx)
        ranks(at.mix_s, tx)
        met()  # x_s, which may hold dk_s, is no longer read
        keep(at.dq_s, written.dqh, b, i, t0 // C, n < s.chunks)
        store(at.v_s[held * C : (held + 1) * C, :], written.dv[b, t0 : t0 + C, h, :])
        lifted.product(mine.q_bias, by.dq_states, by.q_ranks, 8, M, False)
        end_batch(1, mine.dk)
        turned_back(mine.dk, at.k_s, mine.turn, at.cs_s, held * depth, tx)
        narrowed(mine.wide, mine.dk)
        put(at.dk_s, mine.wide, 8, groups, tx)
        turns(tx)
        rows_out(b, h, t0)
        met()
        keep(at.dk_s, written.dkh, b, i, t0 // C, n < s.chunks)
        lifted.product(mine.k_bias, by.dk_states, by.k_ranks, 8, M, False)
        turns_out(b, h, t0)

    return inputs
