"""Sizes of one scan, and which of them a compiled kernel is specialised for: all but the batch and the length.

Letters: B batch, S padded sequence (a multiple of L), H value heads, G groups sharing q and k, N state size, P head
width, R MIMO rank, A rotary angles of the tables, C tokens per chunk, M = R * C rows of one chunk in (rank, time)
order, L tokens per super-chunk, K super-chunks of a row.

A super-chunk is a row of its own for the kernels that walk chunks: they see a batch of B * K rows of L tokens, which is
the same memory, [B,S,...] = [B*K,L,...]. So every loop and stride in them is a constant, and the batch and the length
are the size of their grid.
"""
# ruff: noqa: N802

from dataclasses import dataclass
from typing import Any

from kernels.backends import Lane
from kernels.mamba3_mimo.cuda.machine import MOST_BLOCKS
from kernels.scan_switches import ScanSwitches


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """Sizes of one scan. In a kernel's program B and S are expressions, known when it is launched."""

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
    """Rotary angles of the tables: see `padded_angles`."""
    C: int = ScanSwitches.chunk_size
    """Tokens per chunk."""
    L: int = 256
    """Tokens that one block walks, a multiple of C: a super-chunk, or S, the whole row, in the sequential schedule."""
    gated: bool = True
    """Whether z and zeta are given."""
    reduced: bool = True
    """Whether phi is given: o and dO are [B,S,H,P], else [B,S,R,H,P]."""
    cumulated: bool = False
    """Whether the angles given are cumulated over time."""
    shared_angles: bool = False
    """Whether the raw angles given are one set for all heads, [B,S,1,A]."""
    started: bool = False
    """Whether a state enters the rows: see `compiled.KNOW_THE_START`."""
    in_turn: int = 1
    """Heads of a group that one block of B3 walks one after another, adding up their gradients of q and k."""
    wide: bool = False
    """Whether some tensor has more than 2^31 numbers, so that offsets need 64 bits."""

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
        """Super-chunks of a row whose own sums another one needs: all but the outermost."""
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
        """More walks than there are: what a kernel's program may assume of its place in the grid."""
        per_token = max(self.R * self.H * self.N, self.R * self.H * self.P, self.H * self.N * self.P // self.C)
        return MOST_BLOCKS + 1 if self.wide else (2**31 - 1) // (self.L * per_token)

    @property
    def sums(self) -> Any:
        """Sums over heads that B3 writes of the gradients of q and k."""
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
        """Return the walk that has token t of row b, and the token's number in it."""
        return b * self.K + t // self.L, t % self.L


@dataclass(frozen=True, kw_only=True)
class Variant(ScanSwitches):
    """The switches of the generated kernels."""

    lane: Lane = Lane.CUDA


def padded_angles(angles: int, state_size: int) -> int:
    """Return A for a scan with `angles` rotary angles: a multiple of 16, but at most all N / 2 pairs.

    The angles added are zero: they turn nothing.
    """
    return min(-(-angles // 16) * 16, state_size // 2)
