"""What the sizes of a scan decide, with its switches: looked up by every pass, since it holds no tensor."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from kernels.mamba3_mimo.cuda.host import halves
from kernels.mamba3_mimo.cuda.host.heads_in_turn import in_turn
from kernels.mamba3_mimo.cuda.host.lengths import chosen, walked
from kernels.mamba3_mimo.cuda.host.shape import ScanShape, padded_angles
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces.tensors import tensors
from kernels.mamba3_mimo.inputs import ScanInputs


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
    return Settled(shape, variant, halves.are_needed(shape), saved, tensors(shape))


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
