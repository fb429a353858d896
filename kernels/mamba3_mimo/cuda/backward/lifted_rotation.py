"""How B3 in the lifted form (lifted.py) undoes the rotation of q and k, where the products leave their gradients.

Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.lifted_places import split_of
from kernels.mamba3_mimo.cuda.host.machine import GROUP
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces import scalar
from kernels.mamba3_mimo.cuda.pieces.matrices import column, lane_row, second, take
from kernels.mamba3_mimo.cuda.pieces.scalar import RotaryPair
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, f32


def make_turned_back(s: ScanShape) -> Any:
    """Return macro(grad [32], tile_s [M,N], turn, cs_s, first, tx): undo the rotation, in registers.

    grad is the gradient of the rotated tile_s, whose columns are those of `panel_column`; adds the gradient of the
    thread's angles, of blocks `split_of(s).angles`, to `turn`.
    """
    C, (groups, _, _, blocks) = s.C, split_of(s)

    @T.macro
    def turned_back(grad, tile_s, turn, cs_s, first, tx):
        pair, cs = T.alloc_local((8,), BF16), T.alloc_local((8,), F16)
        cos, sin, lo, hi = (T.alloc_local((2,), F32) for _ in range(4))
        for block in T.unroll(blocks):
            take(pair, tile_s[lane_row(tx), tx // GROUP * 64 + block * 8 + second(tx) * 32])
            take(cs, cs_s[first + column(tx, block, groups) // 8 * 2 + second(tx), lane_row(tx) % C, 0])
            for lower in (0, 1):
                for e in T.vectorized(2):
                    cos[e] = f32(cs[lower * 2 + e])
                for e in T.vectorized(2):
                    sin[e] = f32(cs[4 + lower * 2 + e])
                for e in T.vectorized(2):
                    lo[e] = f32(pair[lower * 2 + e])
                for e in T.vectorized(2):
                    hi[e] = f32(pair[4 + lower * 2 + e])
                for e in T.unroll(2):
                    i = block * 4 + lower * 2 + e
                    turn[(lower * blocks + block) * 2 + e] += scalar.moment(
                        RotaryPair(grad[i], grad[i + 16]), RotaryPair(lo[e], hi[e])
                    )
                    # lo is free now
                    lo[e] = scalar.turned_back(grad[i], grad[i + 16], cos[e], sin[e]).lo
                    grad[i + 16] = scalar.turned_back(grad[i], grad[i + 16], cos[e], sin[e]).hi
                    grad[i] = lo[e]

    return turned_back
