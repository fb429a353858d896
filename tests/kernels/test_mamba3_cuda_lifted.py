"""The lifted form of B3: its conditions, and the positions of a thread's numbers in a tile."""

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang.language as T  # noqa: N812

from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import lifts
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import (
    column,
    kept,
    put,
    put_turned,
    row,
    scatter_sums,
    take_turned,
)
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from tests.kernels import tile_interpreter

SIZES = {"B": 1, "S": 256, "H": 2, "G": 1, "N": 64, "P": 64, "R": 4, "A": 16, "C": 16, "L": 256}


@pytest.mark.parametrize(
    ("sizes", "switches", "lifted"),
    [
        ({}, {}, True),
        ({"A": 32}, {}, True),
        ({"R": 8, "C": 8}, {}, True),
        ({"N": 128, "A": 64}, {}, True),
        ({"N": 128, "R": 2, "C": 32}, {}, True),
        ({}, {"tma": False, "layout_2d": False, "fast_math": False, "pipeline_stages": 0, "remat": True}, True),
        ({"N": 128, "R": 8, "C": 8}, {}, False),
        ({"R": 2, "C": 32}, {}, False),
        ({"R": 1, "C": 64}, {}, False),
        ({"N": 32}, {}, False),
        ({"P": 128}, {}, False),
        ({"C": 8}, {}, False),
        ({}, {"pipeline_stages": 2}, False),
        ({}, {"psiv_cache": True}, False),
        ({}, {"aggressive_smem_merge": True}, False),
        ({}, {"warp_specialize": True}, True),
    ],
)
def test_form_is_taken_where_it_fits(sizes, switches, lifted):
    shape = ScanShape(**SIZES | sizes)
    assert lifts(shape, Variant(chunk_size=shape.C, **switches)) is lifted


def run(body, groups):
    """Return the tile [64,64] that `body`, a macro(tile, tx), fills."""

    @T.prim_func
    def one_block(y: T.Tensor((64, 64), F32)):
        with T.Kernel(1, threads=128 * groups) as _:
            tx = T.get_thread_binding()
            tile = T.alloc_shared((64, 64), BF16)
            body(tile, tx)
            T.sync_threads()
            T.copy(tile, y)

    y = torch.full((64, 64), float("nan"))
    tile_interpreter.run(one_block, y)
    return y


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_accumulator_reaches_the_tile_where_its_thread_says(groups, turned):
    blocks = 8 // groups

    @T.macro
    def body(tile, tx):
        values, back = T.alloc_local((blocks * 4,), BF16), T.alloc_local((blocks * 4,), BF16)
        for block in T.unroll(blocks):
            for lower in T.unroll(2):
                for e in T.unroll(2):
                    values[block * 4 + lower * 2 + e] = row(tx, lower) * 64 + column(tx, block, groups) + e
        if turned:
            put_turned(tile, 0, values, blocks, groups, tx)
            T.sync_threads()
            take_turned(back, tile, 0, blocks, groups, tx)
            T.sync_threads()
            put_turned(tile, 0, back, blocks, groups, tx)
        else:
            put(tile, values, blocks, groups, tx)

    expected = torch.arange(64.0 * 64).view(64, 64)
    assert torch.equal(run(body, groups), expected.T if turned else expected)


def test_groups_put_their_columns_side_by_side():
    @T.macro
    def body(tile, tx):
        values = T.alloc_local((16,), BF16)
        for block in T.unroll(4):
            for lower in T.unroll(2):
                for e in T.unroll(2):
                    values[block * 4 + lower * 2 + e] = column(tx, block, 2) + e
        put(tile, values, 4, 2, tx, panel=32)

    natural = torch.arange(64.0).view(4, 2, 8)
    assert torch.equal(run(body, 2), natural.transpose(0, 1).reshape(64).expand(64, 64))


@pytest.mark.parametrize("count", [2, 4, 8, 32])
def test_sums_over_lanes_are_kept_where_said(count):
    @T.prim_func
    def one_block(y: T.Tensor((4, 4, count), F32)):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            values = T.alloc_local((count,), F32)
            for c in T.unroll(count):
                values[c] = (tx % 32 // 4 + 1) * (c + 1) + tx % 4 * 1000 + tx // 32 * 100000
            scatter_sums(values, count, tx)
            for c in T.unroll(max(1, count // 8)):
                y[tx // 32, tx % 4, kept(count, tx) + c] = values[c]

    y = torch.full((4, 4, count), float("nan"))
    tile_interpreter.run(one_block, y)
    warp, lane, number = torch.arange(4.0), torch.arange(4.0), torch.arange(1.0, count + 1)
    assert torch.equal(y, 36 * number + 8000 * lane[:, None] + 800000 * warp[:, None, None])
