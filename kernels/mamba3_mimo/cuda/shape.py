"""Sizes and switches of one scan. A compiled kernel is specialised for all sizes except batch and length.

Letters: B batch, S padded sequence (a multiple of L), H value heads, G groups sharing q and k, N state size, P head
width, R MIMO rank, A rotary angles of the tables, C tokens per chunk, M = R * C rows of one chunk in (rank, time)
order, L tokens per super-chunk, K super-chunks of a row.

Kernels that walk chunks see every super-chunk as a row: a batch of B * K rows of L tokens in the same memory,
[B,S,...] = [B*K,L,...]. So their loops and strides are constants, and batch and length only set the size of the grid.
"""
# ruff: noqa: N802

from dataclasses import dataclass
from typing import Any

from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanSwitches

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a block may use."""
ALIGNMENT = 16
"""Alignment in bytes that the bulk copy engine and the widest loads need."""
GROUP = 128
"""Threads of a warp group, which issues a matrix instruction together."""
LINE = 128
"""Bytes of a row of a swizzled tile for the matrix unit: 64 bf16 columns. Further columns are further tiles."""
SWIZZLE_128 = 1
"""The matrix unit's code for tiles whose rows are swizzled within 128 bytes."""
PROCESSORS = 132
"""Streaming multiprocessors."""
MOST_BLOCKS = 2**16 - 1
"""Most blocks of a grid along any axis but the first."""


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """Sizes of one scan. In a kernel's program B and S are expressions, whose values the launch sets."""

    B: int
    """Batch."""
    S: int
    """Sequence length, a multiple of L."""
    H: int
    """Value heads."""
    G: int
    """Groups of heads sharing q and k."""
    N: int
    """State size per head."""
    P: int
    """Head width."""
    R: int
    """MIMO rank."""
    A: int
    """Rotary angles of the tables, see `padded_angles`."""
    C: int = ScanSwitches.chunk_size
    """Tokens per chunk."""
    L: int = 256
    """Tokens that one block walks, a multiple of C: a super-chunk, or the whole row S in the sequential schedule."""
    gated: bool = True
    """Whether there is an output gate, z and zeta."""
    reduced: bool = True
    """Whether there is phi. If so, o and dO are [B,S,H,P], else [B,S,R,H,P]."""
    cumulated: bool = False
    """Whether the angles are cumulated over time."""
    shared_angles: bool = False
    """Whether all heads share one set of raw angles, [B,S,1,A]."""
    started: bool = False
    """Whether a state enters the rows, see `compiled.READS_START`."""
    in_turn: int = 1
    """Heads of a group that one block of B3 walks in turn, adding up their gradients of q and k."""
    wide: bool = False
    """Whether a tensor has more than 2^31 numbers, so that offsets need 64 bits."""

    @property
    def M(self) -> int:
        """Rows of one chunk."""
        return self.R * self.C

    @property
    def K(self) -> int:
        """Super-chunks of a row."""
        return self.S // self.L

    @property
    def handed_on(self) -> int:
        """Super-chunks of a row whose sums another super-chunk needs: all except the outermost."""
        return max(1, self.K - 1)

    @property
    def walks(self) -> int:
        """Super-chunks of all rows."""
        return self.B * self.K

    @property
    def chunks(self) -> int:
        """Chunks of a super-chunk."""
        return self.L // self.C

    @property
    def most_walks(self) -> int:
        """Upper bound of the walks that a kernel's program may assume for its block index."""
        per_token = max(self.R * self.H * self.N, self.R * self.H * self.P, self.H * self.N * self.P // self.C)
        return MOST_BLOCKS + 1 if self.wide else (2**31 - 1) // (self.L * per_token)

    @property
    def sums(self) -> Any:
        """Sums over heads of the gradients of q and k that B3 writes."""
        return self.H // self.in_turn

    @property
    def heads_per_group(self) -> int:
        """Heads that read the same q and k."""
        return self.H // self.G

    @property
    def angle_heads(self) -> int:
        """Sets of raw angles."""
        return 1 if self.shared_angles else self.H

    def place(self, b: Any, t: Any) -> tuple[Any, Any]:
        """Return the walk with token t of row b, and the token's index in the walk."""
        return b * self.K + t // self.L, t % self.L


@dataclass(frozen=True, kw_only=True)
class Variant(ScanSwitches):
    """The switches of the generated kernels."""

    lane: Lane = Lane.CUDA


def padded_angles(angles: int, state_size: int) -> int:
    """Return A for a scan with `angles` rotary angles: a multiple of 16, but at most all N / 2 pairs.

    The added angles are zero and turn nothing.
    """
    return min(-(-angles // 16) * 16, state_size // 2)
