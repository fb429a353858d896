"""Positions of a row's tokens in tensors whose batch and length only the launch sets. Letters: see shape.py."""

# TileLang programs: `T` is the language's own name.
# ruff: noqa: N812

from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape

EDGE = 64
"""Tokens between two edges, see `make_edge` in backward/gradients_chunk.py; a multiple of every chunk size."""
BLOCK = 4 * EDGE
"""Tokens of one block of F0: EDGE for each of its warps."""


def blocks_of(s: ScanShape) -> Any:
    """Return the number of blocks along time in the kernels of the angles."""
    return (s.S + BLOCK - 1) // BLOCK


def short(s: ScanShape, place: Any, numbers: int) -> Any:
    """Return a position of `numbers` numbers each, bounded so that the compiler may use 32-bit offsets."""
    return place if s.wide else T.min(place, (2**31 - 1) // numbers - 1)


def of_head(s: ScanShape, b: Any, h: Any, t: Any) -> Any:
    """Return the position of token t of row b and head h in a tensor with one number for each."""
    return short(s, (b * s.H + h) * s.S + t, 1)


def token(s: ScanShape, b: Any, t: Any) -> Any:
    """Return the position of token t of row b among the tokens of all rows."""
    return short(s, b * s.S + t, s.H * s.A)


def whole(s: ScanShape) -> bool:
    """Return whether all rows and walks end at the end of a block of EDGE tokens."""
    return s.L % EDGE == 0


def inside(s: ScanShape, t: Any) -> Any:
    """Return token t, or the last token of a row that ends within the block of t."""
    return t if whole(s) else T.min(t, s.S - 1)


def walk_place(s: ScanShape, b: Any, blk: Any, t: Any) -> tuple[Any, Any]:
    """Return the walk with token `t` (0 to EDGE) of block `blk` of row b, and the token's index in the walk."""
    if whole(s):
        walk, first = s.place(b, blk * EDGE)
        at = first + t
    else:
        walk, at = s.place(b, inside(s, blk * EDGE + t))
    return short(s, walk, s.H * max(s.L * s.A, 2 * s.N)), at


def place_before(s: ScanShape, b: Any, blk: Any, t: Any) -> tuple[Any, Any]:
    """Return the same for the previous token, or for the row's first token if there is none."""
    walk, at = s.place(b, T.max(inside(s, blk * EDGE + t) - 1, 0))
    return short(s, walk, s.H * max(s.L * s.A, 2 * s.N)), at


def edge_place(s: ScanShape, b: Any, blk: Any) -> tuple[Any, Any]:
    """Return the walk with edge `blk` of row b, and the edge's index in it. A walk shorter than EDGE has one edge."""
    walk, t = walk_place(s, b, blk, 0)
    return walk, t // EDGE
