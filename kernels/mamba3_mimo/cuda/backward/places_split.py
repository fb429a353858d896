"""Where things lie in the backward walk with two warp groups: tiles in shared memory, threads in a matrix, a block.

The spread of a matrix over threads: tiles_split.py. Letters: see shape.py.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from kernels.mamba3_mimo.cuda.host.machine import GROUP


class Pool(NamedTuple):
    """First rows of the tiles in the block's one buffer [rows, 64]."""

    panels: int
    """Tiles of 64 columns in a row of q, k; tiles of 64 rows in a state."""
    chunk: int
    """Tokens of a chunk."""

    @property
    def q(self) -> int:
        """Two slots."""
        return 0

    @property
    def k(self) -> int:
        """Two slots."""
        return 128 * self.panels

    @property
    def h(self) -> int:
        """Two slots of the states that enter; dq once they are read."""
        return 256 * self.panels

    @property
    def x(self) -> int:
        """Two slots."""
        return 384 * self.panels

    @property
    def g(self) -> int:
        """The gradient of y."""
        return self.x + 128

    @property
    def gw(self) -> int:
        """The same, decayed from the start of the chunk."""
        return self.x + 192

    @property
    def e(self) -> int:
        """The gradient of the state that leaves; dk once read."""
        return self.x + 256

    @property
    def v(self) -> int:
        """Three slots of one chunk."""
        return self.e + 64 * self.panels

    @property
    def z(self) -> int:
        """One chunk."""
        return self.v + 3 * self.chunk

    @property
    def do(self) -> int:
        """One chunk."""
        return self.z + self.chunk

    @property
    def rows(self) -> int:
        """Rows of the buffer."""
        return self.do + self.chunk


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
