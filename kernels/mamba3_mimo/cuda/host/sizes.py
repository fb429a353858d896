"""What the sizes of a scan and its switches determine. No tensor is involved, so every pass looks it up in a cache."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from torch import Tensor

from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import lifts
from ablate.kernels.mamba3_mimo.cuda.host import wide_heads
from ablate.kernels.mamba3_mimo.cuda.host.lengths import blocks_at_once, choose_walk, walk_length
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import tensors
from ablate.kernels.mamba3_mimo.cuda.shape import ALIGNMENT, ScanShape, Variant, padded_angles
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.scan_switches import HEADS_IN_TURN

MOST_RANGES = 8
"""Most ranges of walks with `remat`. More save little: an eighth of the states is less than the rest that is saved."""


class Sizes(NamedTuple):
    """Sizes of a scan's inputs."""

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


class ScanPlan(NamedTuple):
    """How to run a scan, as far as sizes and switches determine it."""

    shape: ScanShape
    """Sizes of the kernels, before heads are split."""
    variant: Variant
    """Switches without open choices."""
    halved: bool
    """Whether heads are too wide for the kernels."""
    saved: tuple[str, ...]
    """Tensors that the forward pass saves for the backward pass."""
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of the kernels' tensors, see pieces/tensors.py."""


@lru_cache(maxsize=256)
def plan_of(sizes: Sizes, variant: Variant) -> ScanPlan:
    """Return how to run a scan of these sizes."""
    variant = resolve(sizes, variant)
    shape = shape_of(sizes, variant)
    parallel, remat = variant.schedule == "chunk_parallel", variant.remat
    is_saved = {"wq": parallel, "carry": parallel, "start": parallel and remat, "states": not remat}
    is_saved["psiv"] = variant.psiv_cache
    names = ("reset", "cs", "lc", "sk", "gm", "wq", "carry", "start", "states", "psiv")
    saved = tuple(name for name in names if is_saved.get(name, True))
    return ScanPlan(shape, variant, wide_heads.must_split(shape), saved, tensors(shape))


def resolve(sizes: Sizes, variant: Variant) -> Variant:
    """Return the variant with the walk chosen for these sizes, see `choose_walk`."""
    B, tokens, H, P = sizes.v
    return choose_walk(variant, rows=int(B * H), tokens=int(tokens), state=int(sizes.q[4] * P))


def shape_of(sizes: Sizes, variant: Variant) -> ScanShape:
    """Return the sizes of the kernels."""
    B, tokens, R, G, N = sizes.q
    H, P = sizes.v[2:]
    L = walk_length(resolve(sizes, variant), tokens)
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
    shape = replace(shape, in_turn=choose_heads_in_turn(variant, shape))
    return replace(shape, wide=True) if shape.walks >= shape.most_walks else shape


def choose_heads_in_turn(variant: Variant, shape: ScanShape) -> int:
    """Return how many heads of a group a block of the backward walk takes in turn.

    Without a request: as many as need no more waves of blocks than single heads. The gradients of q and k of all heads
    are each as large as q and k for all heads, and a kernel reads them again to add them up. With four heads in turn it
    reads a quarter. The sums are rounded to bfloat16 after every head, so the number stays small.
    """
    if variant.heads_in_turn > 0:
        return variant.heads_in_turn
    return next(n for n in reversed(HEADS_IN_TURN) if n == 1 or (n > 1 and _is_free(n, variant, shape)))


def _is_free(heads: int, variant: Variant, shape: ScanShape) -> bool:
    blocks, most = int(shape.walks * shape.H), blocks_at_once(shape.N * shape.P)
    waves = -(-blocks // (heads * most)) * heads
    return shape.heads_per_group % heads == 0 and waves <= -(-blocks // most) and lifts(shape, variant)


@dataclass(frozen=True)
class WalkRange:
    """Walks `first` to `end` (exclusive) of `all`: a scan of its own, because kernels take any number of walks."""

    first: int
    end: int
    all: int

    @property
    def walks(self) -> int:
        """Number of walks in the range."""
        return self.end - self.first

    def of(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return the parts of tensors [walks,...] for this range, without a copy."""
        if self.walks == self.all:
            return tuple(tensors)
        return tuple(tensor[self.first : self.end] for tensor in tensors)


def all_walks(s: ScanShape) -> tuple[WalkRange]:
    """Return all walks as one range."""
    return (WalkRange(0, s.walks, s.walks),)


def walk_ranges(s: ScanShape) -> tuple[WalkRange, ...]:
    """Return ranges of one size (the last may be smaller) for `remat`: as many as take no more time.

    The blocks of a range run in waves over the processors, and a wave takes as long with one block as with all. Every
    range starts at an address for wide loads: the narrowest tensor has 4 H bytes per walk.
    """
    blocks, unit = blocks_at_once(s.N * s.P), ALIGNMENT // gcd(4 * s.H, ALIGNMENT)

    def waves(size: int) -> int:
        return sum(-(-one.walks * s.sums // blocks) for one in _of_size(s, size))

    sizes = sorted({-(-s.walks // (count * unit)) * unit for count in range(1, MOST_RANGES + 1)})
    return _of_size(s, next(size for size in sizes if waves(size) <= waves(s.walks)))


def _of_size(s: ScanShape, size: int) -> tuple[WalkRange, ...]:
    return tuple(WalkRange(first, min(first + size, s.walks), s.walks) for first in range(0, s.walks, size))
