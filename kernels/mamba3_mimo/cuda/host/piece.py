"""Some of a scan's walks: what the backward pass takes at once where it makes the states of the chunks again.

Kernels take any number of walks, and a walk's numbers lie together, so a part of the walks is a scan of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from torch import Tensor

from kernels.mamba3_mimo.cuda.host.lengths import at_once
from kernels.mamba3_mimo.cuda.host.machine import ALIGNMENT
from kernels.mamba3_mimo.cuda.host.shape import ScanShape

MOST_PIECES = 8
"""More save little: an eighth of the states is less than what a pass keeps besides."""


@dataclass(frozen=True)
class Piece:
    """Walks `first` to `end`, without `end`, of `all`."""

    first: int
    end: int
    all: int

    @property
    def walks(self) -> int:
        """How many they are."""
        return self.end - self.first

    def of(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return the part of these walks of tensors [walks,...], without a copy."""
        if self.walks == self.all:
            return tuple(tensors)
        return tuple(tensor[self.first : self.end] for tensor in tensors)


def whole(s: ScanShape) -> tuple[Piece]:
    """Return all walks as one piece."""
    return (Piece(0, s.walks, s.walks),)


def pieces(s: ScanShape) -> tuple[Piece, ...]:
    """Return the walks in as many pieces of one size as take no more time: the last one may be smaller.

    The blocks of a piece run in waves over the processors, and a wave takes as long with one block as with all. Every
    piece begins at an address that wide loads take: the narrowest tensor has 4 H bytes a walk.
    """
    blocks, unit = at_once(s.N * s.P), ALIGNMENT // gcd(4 * s.H, ALIGNMENT)

    def waves(size: int) -> int:
        return sum(-(-piece.walks * s.sums // blocks) for piece in _of_size(s, size))

    sizes = sorted({-(-s.walks // (count * unit)) * unit for count in range(1, MOST_PIECES + 1)})
    return _of_size(s, next(size for size in sizes if waves(size) <= waves(s.walks)))


def _of_size(s: ScanShape, size: int) -> tuple[Piece, ...]:
    return tuple(Piece(first, min(first + size, s.walks), s.walks) for first in range(0, s.walks, size))
