"""What the sizes of a scan decide, with its switches: looked up by every pass, since it holds no tensor."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from torch import Tensor

from kernels.mamba3_mimo.cuda.backward.lifted_layout import lifts
from kernels.mamba3_mimo.cuda.host import wide_heads
from kernels.mamba3_mimo.cuda.host.lengths import at_once, chosen, walked
from kernels.mamba3_mimo.cuda.machine import ALIGNMENT
from kernels.mamba3_mimo.cuda.pieces.tensors import tensors
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant, padded_angles
from kernels.mamba3_mimo.inputs import ScanInputs
from kernels.scan_switches import HEADS_IN_TURN


def in_turn(variant: Variant, shape: ScanShape) -> int:
    """Return as many heads as is asked for, or else as many as take no more waves of blocks than one by one."""
    if variant.heads_in_turn > 0:
        return variant.heads_in_turn
    return next(n for n in reversed(HEADS_IN_TURN) if n == 1 or (n > 1 and _is_free(n, variant, shape)))


def _is_free(heads: int, variant: Variant, shape: ScanShape) -> bool:
    blocks, most = int(shape.walks * shape.H), at_once(shape.N * shape.P)
    waves = -(-blocks // (heads * most)) * heads
    return shape.heads_per_group % heads == 0 and waves <= -(-blocks // most) and lifts(shape, variant)


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


class Sizes(NamedTuple):
    """What is read of a scan's inputs without their numbers."""

    q: tuple[int, ...]
    """[B,S,R,G,N]."""
    v: tuple[int, ...]
    """[B,S,H,P]."""
    angles: tuple[int, ...]
    """[B,S,H,A] or [B,S,1,A]."""
    gated: bool
    reduced: bool
    cumulated: bool
    started: bool


def sizes_of(inputs: ScanInputs) -> Sizes:
    """Return the sizes of a scan's inputs."""
    return Sizes(
        q=inputs.q.shape,
        v=inputs.v.shape,
        angles=inputs.angles.shape,
        gated=inputs.z is not None,
        reduced=inputs.phi is not None,
        cumulated=inputs.angles_cumulated,
        started=inputs.entering is not None,
    )


class Settled(NamedTuple):
    """What sizes and switches decide of a scan."""

    shape: ScanShape
    """The sizes of the kernels, heads as they are."""
    variant: Variant
    """With what was left open."""
    halved: bool
    """Whether heads are too wide for the kernels."""
    saved: tuple[str, ...]
    """What the forward pass keeps for the backward pass."""
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of the kernels' tensors: see pieces/tensors.py."""


@lru_cache(maxsize=256)
def settled(sizes: Sizes, variant: Variant) -> Settled:
    """Return what sizes and switches decide."""
    variant = resolved(sizes, variant)
    shape = shape_of(sizes, variant)
    parallel, remat = variant.schedule == "chunk_parallel", variant.remat
    kept = {"wq": parallel, "carry": parallel, "start": parallel and remat, "states": not remat}
    kept |= {"psiv": variant.psiv_cache}
    names = ("reset", "cs", "lc", "sk", "gm", "wq", "carry", "start", "states", "psiv")
    saved = tuple(name for name in names if kept.get(name, True))
    return Settled(shape, variant, wide_heads.are_needed(shape), saved, tensors(shape))


def resolved(sizes: Sizes, variant: Variant) -> Variant:
    """Return the variant with what it leaves to the sizes: see lengths.py."""
    B, tokens, H, P = sizes.v
    return chosen(variant, rows=int(B * H), tokens=int(tokens), state=int(sizes.q[4] * P))


def shape_of(sizes: Sizes, variant: Variant) -> ScanShape:
    """Return the sizes of the kernels."""
    B, tokens, R, G, N = sizes.q
    H, P = sizes.v[2:]
    L = walked(resolved(sizes, variant), tokens)
    shape = ScanShape(
        B=B,
        S=-(-tokens // L) * L,
        H=H,
        G=G,
        N=N,
        P=P,
        R=R,
        A=padded_angles(sizes.angles[-1], N),
        C=variant.chunk_size,
        L=L,
        gated=sizes.gated,
        reduced=sizes.reduced,
        cumulated=sizes.cumulated,
        shared_angles=sizes.angles[2] < H,
        started=sizes.started,
    )
    shape = replace(shape, in_turn=in_turn(variant, shape))
    return replace(shape, wide=True) if shape.walks >= shape.most_walks else shape
