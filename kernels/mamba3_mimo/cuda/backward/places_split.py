"""Where things lie in the backward walk with two warp groups: tiles in shared memory, threads in a matrix, a block.

The spread of a matrix over threads: tiles_split.py. Letters: see shape.py.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from kernels.mamba3_mimo.cuda.host.machine import GROUP
from kernels.mamba3_mimo.cuda.host.shape import ScanShape


class Pool(NamedTuple):
    """First rows of the tiles in the block's one buffer [rows, 64]."""

    q: int
    """Two slots; k likewise."""
    k: int
    h: int
    """Two slots of the states that enter; dq once they are read."""
    x: int
    """Two slots."""
    g: int
    """The gradient of y; gw the same, decayed from the start of the chunk."""
    gw: int
    e: int
    """The gradient of the state that leaves; dk once read."""
    v: int
    """Three slots of one chunk."""
    z: int
    """One chunk; do likewise."""
    do: int
    rows: int
    """Rows of the buffer."""


def pool_of(s: ScanShape) -> Pool:
    """Return where the tiles lie: q, k and states have N / 64 tiles of 64 rows in a slot, z and its like C rows."""
    two, one, C = s.N // 64 * 128, s.N // 64 * 64, s.C
    return Pool(0, *accumulate((two, two, two, 128, 64, 64, one, 3 * C, C, C)))


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block's place and what both of its roles use."""

    tx: Any
    b: Any
    h: Any
    nc: Any
    base: Any
    skip: Any
    pool: Any
    cs_s: Any
    sc_s: Any
    w_s: Any
    wt_s: Any
    turn_s: Any
    tab_s: Any
    bias_s: Any
    full: Any
    hand: Any


def place(tx: Any, ranks: int) -> tuple[Any, ...]:
    """Return where a thread of a role stands: warp, row and column of its first element, rank, matrix row and side.

    The column is given twice, doubled the second time: elements lie in pairs.
    """
    row, side = tx % GROUP // 32 * 16 + tx % 16, tx % 32 // 16
    return tx % GROUP // 32, tx % 32 // 4, tx % 4, tx % 4 * 2, tx % 32 // 4 % ranks, row, side


def lane_bytes(row: Any, side: Any) -> Any:
    """Return the byte offset in a swizzled tile of what the thread passes to a matrix load or store."""
    return row * 128 + (side ^ row % 8) * 16


def first_of(count: int, ranks: int, tx: Any) -> Any:
    """Return the first of the `count` values that the thread holds after the sum over ranks."""
    first, bit = 0, 4
    while bit < 4 * ranks:
        count //= 2
        first = first + tx // bit % 2 * count
        bit *= 2
    return first
