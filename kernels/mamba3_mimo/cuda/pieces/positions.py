"""Where a token of a row lies in tensors whose batch and length are known at launch only. Letters: see shape.py."""

# TileLang programs: `T` is the language's own name.
# ruff: noqa: N812

from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.shape import ScanShape

EDGE = 64
"""Tokens between two edges, see backward/edges.py; a multiple of every chunk size."""
BLOCK = 4 * EDGE
"""Tokens of one block of F0: EDGE for each of its warps."""


def blocks_of(s: ScanShape) -> Any:
    """Return the blocks of the kernels of the angles along time."""
    return (s.S + BLOCK - 1) // BLOCK


def short(s: ScanShape, place: Any, numbers: int) -> Any:
    """Return the place of `numbers` numbers each, so that the compiler sees where offsets fit into 32 bits."""
    return place if s.wide else T.min(place, (2**31 - 1) // numbers - 1)


def of_head(s: ScanShape, b: Any, h: Any, t: Any) -> Any:
    """Return the place of token t of row b and head h in what has one number for each."""
    return short(s, (b * s.H + h) * s.S + t, 1)


def token(s: ScanShape, b: Any, t: Any) -> Any:
    """Return the place of token t of row b among the tokens of all rows."""
    return short(s, b * s.S + t, s.H * s.A)


def whole(s: ScanShape) -> bool:
    """Tell whether rows end where a block of EDGE tokens ends, and walks as well."""
    return s.L % EDGE == 0


def inside(s: ScanShape, t: Any) -> Any:
    """Return token t, or the last of a row that ends within the block of t."""
    return t if whole(s) else T.min(t, s.S - 1)


def walk_place(s: ScanShape, b: Any, blk: Any, t: Any) -> tuple[Any, Any]:
    """Return the walk that has token `t` of block `blk` of row b, and the token's number in it; t is from 0 to EDGE."""
    if whole(s):
        walk, first = s.place(b, blk * EDGE)
        at = first + t
    else:
        walk, at = s.place(b, inside(s, blk * EDGE + t))
    return short(s, walk, s.H * max(s.L * s.A, 2 * s.N)), at


def place_before(s: ScanShape, b: Any, blk: Any, t: Any) -> tuple[Any, Any]:
    """Return the same of the token before, or of the row's first."""
    walk, at = s.place(b, T.max(inside(s, blk * EDGE + t) - 1, 0))
    return short(s, walk, s.H * max(s.L * s.A, 2 * s.N)), at


def edge_place(s: ScanShape, b: Any, blk: Any) -> tuple[Any, Any]:
    """Return the walk that has edge `blk` of row b, and the edge's number in it: a shorter walk has one, its first."""
    walk, t = walk_place(s, b, blk, 0)
    return walk, t // EDGE
