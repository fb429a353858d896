"""Problems of the bench: for accuracy, for speed beside the official kernels, and beside attention."""

from dataclasses import dataclass, replace
from typing import Any

from ablate.kernels.backends import Lane
from tests.kernels.problem import Case


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """One problem, with the chunk size of the official tests."""

    name: str
    """Row heading."""
    case: Case
    """The problem."""
    official_chunk: int = 16
    """Tokens per chunk of the official kernels."""

    def options(self, lane: Lane) -> dict[str, Any]:
        """Return the fields of ScanSwitches for this problem on a lane.

        Ours has 64 rows of (rank, time) in a chunk, or fewer if its shared memory is too small.
        """
        if lane == Lane.PEER:
            return {"schedule": "sequential", "chunk_size": self.official_chunk}
        return {"chunk_size": self.official_chunk if self.case.N == 256 else 64 // self.case.R}

    def compiling(self, lane: Lane) -> Case:
        """Return the cheapest problem with the same kernels. The official kernels of packed rows have an open S."""
        if lane != Lane.PEER or (self.case.documents == 1 and self.case.S % self.official_chunk == 0):
            return self.case
        return replace(self.case, B=1, S=4 * self.official_chunk, documents=2)


OFFICIAL_SHAPES = (
    (16, 64, 4, 8), (32, 64, 4, 16), (64, 64, 4, 16), (128, 64, 4, 16), (256, 64, 4, 8), (64, 128, 4, 16),
    (128, 32, 4, 16), (128, 128, 4, 8), (128, 64, 8, 8), (128, 64, 2, 32), (128, 64, 1, 64),
)  # fmt: skip
"""(N, P, R, C) of the official tests, at B=4 S=2048 H=16 G=1."""
WITH_GRADIENTS = ((32, 64, 4, 16), (64, 64, 4, 16), (128, 64, 4, 16), (64, 128, 4, 16), (128, 64, 2, 32))
"""Shapes with a comparison of gradients. With (16, 64) the official backward pass does not compile."""


def _official(shape: tuple[int, int, int, int]) -> BenchCase:
    state, width, rank, chunk = shape
    case = Case(B=4, S=2048, H=16, N=state, P=width, R=rank, gradients=shape in WITH_GRADIENTS)
    return BenchCase(name=f"N{state} P{width} R{rank}", case=case, official_chunk=chunk)


ACCURACY = (
    *(_official(shape) for shape in OFFICIAL_SHAPES),
    BenchCase(name="S8191", case=Case(B=2, S=8191, H=8)),
    BenchCase(name="four documents", case=Case(B=2, S=2048, H=16, documents=4)),
    BenchCase(name="G4", case=Case(B=2, S=2048, H=16, G=4)),
    BenchCase(name="rope 1", case=Case(B=2, S=2048, H=16, rope=1.0)),
)
"""Problems to compare with the float64 reference."""

SPEED = (
    BenchCase(name="B8 S8192 H16 N64", case=Case(B=8, S=8192, H=16)),
    BenchCase(name="B1 S65536 H16 N64", case=Case(B=1, S=65536, H=16)),
    BenchCase(name="B8 S2048 H32 N128", case=Case(B=8, S=2048, H=32, N=128)),
)
"""Timed problems."""

ATTENTION = tuple(
    BenchCase(name=f"S{length} B{batch}", case=Case(B=batch, S=length, H=16))
    for length, batch in ((4096, 16), (8192, 8), (65536, 1))
)
"""Scans to time beside causal attention with as many heads of the same width."""
