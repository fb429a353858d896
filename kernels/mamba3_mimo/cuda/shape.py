"""Static sizes that one set of compiled kernels is specialised for.

Letters: B batch, S padded sequence (a multiple of C), H value heads, G groups sharing q and k, N state size, P head
width, R MIMO rank, A rotary angles, C tokens per chunk, M = R * C rows of one chunk in (rank, time) order,
L tokens per super-chunk, K super-chunks.
"""
# ruff: noqa: N802

from dataclasses import dataclass


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
    """Rotary angles: N / 4 or N / 2."""
    C: int = 16
    """Tokens per chunk."""
    L: int = 256
    """Tokens per super-chunk, a multiple of C."""

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
