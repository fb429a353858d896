"""Static sizes that one set of compiled kernels is specialised for.

Letters: B batch, S padded sequence (a multiple of C), H value heads, G groups sharing q and k, N state size, P head
width, R MIMO rank, A rotary angles of the tables, C tokens per chunk, M = R * C rows of one chunk in (rank, time)
order, L tokens per super-chunk, K super-chunks.
"""
# ruff: noqa: N802

from dataclasses import dataclass

from kernels.scan import ScanSwitches


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """Sizes of one scan, hashable: the key of the kernel cache."""

    B: int
    """Batch."""
    S: int
    """Sequence length, a multiple of C."""
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
    L: int = ScanSwitches.superchunk
    """Tokens per super-chunk, a multiple of C; S when one block walks the whole sequence."""
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

    @property
    def M(self) -> int:
        """Rows of one chunk."""
        return self.R * self.C

    @property
    def K(self) -> int:
        """Super-chunks."""
        return -(-self.S // self.L)

    @property
    def NC(self) -> int:
        """Chunks in a full super-chunk."""
        return self.L // self.C

    @property
    def chunks(self) -> int:
        """Chunks of the whole sequence."""
        return self.S // self.C

    @property
    def heads_per_group(self) -> int:
        """Heads that read the same q and k."""
        return self.H // self.G

    @property
    def angle_heads(self) -> int:
        """Sets of raw angles."""
        return 1 if self.shared_angles else self.H


def padded_angles(angles: int, state_size: int) -> int:
    """Return A for a scan with `angles` rotary angles: a multiple of 16, but at most all N / 2 pairs.

    The angles added are zero: they turn nothing.
    """
    return min(-(-angles // 16) * 16, state_size // 2)
