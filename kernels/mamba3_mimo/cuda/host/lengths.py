"""How many tokens one block walks. Rows are padded to a multiple of it, and every length of a walk is a set of kernels.

A pass takes about as long as its blocks take in turn: as many waves as the processors need for all of them, each as
long as one walk and what a block does besides. Where one block walks a whole row, three kernels less are launched.
"""

from dataclasses import replace
from functools import lru_cache

from kernels.mamba3_mimo.cuda.machine import PROCESSORS
from kernels.mamba3_mimo.cuda.shape import Variant

LENGTHS = (64, 256, 1024)
"""Super-chunks to choose from: few, so that few kernels are compiled whatever lengths and batches come."""
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Walks over a whole row to choose from, likewise."""
BESIDES = 7
"""Tokens that a block could walk in the time that it needs for its begin and end; from the times of super-chunks of 256
and 1024 tokens."""
HANDING_ON = 9 / 8
"""How much longer a pass takes that makes the states of its super-chunks first, and hands them on."""


@lru_cache(maxsize=1024)
def chosen(variant: Variant, *, rows: int, tokens: int, state: int) -> Variant:
    """Return the variant with what it leaves open: the super-chunk, or one block for a row where that is faster.

    For `rows` = B * H rows of `tokens` tokens with a state of `state` = N * P numbers.
    """
    if variant.schedule != "chunk_parallel" or variant.superchunk != 0:
        return variant

    def time(length: int) -> int:
        return -(-rows * -(-tokens // length) // at_once(state)) * (length + BESIDES)

    fits = [length for length in LENGTHS if length >= 4 * variant.chunk_size]  # what every form of the walk can do
    best = min(fits, key=lambda length: (time(length), -length))
    whole = _bucket(tokens, variant.chunk_size)
    if whole in ROWS and whole >= 4 * variant.chunk_size and time(whole) < HANDING_ON * time(best):
        return replace(variant, schedule="sequential")
    return replace(variant, superchunk=best)


def at_once(state: int) -> int:
    """Return how many blocks of the backward walk run at once with a state of `state` = N * P numbers."""
    return PROCESSORS * (2 if state <= 64 * 64 else 1)


def walked(variant: Variant, tokens: int) -> int:
    """Return L for rows of `tokens` tokens and a variant that leaves nothing open."""
    return variant.superchunk if variant.schedule == "chunk_parallel" else _bucket(tokens, variant.chunk_size)


def _bucket(tokens: int, chunk_size: int) -> int:
    """Return the length of a walk over a whole row: sixteen to an octave, so that few kernels are compiled.

    It is a power of two up to 64, then a multiple of 64; the padding is less than 64 tokens or a sixteenth.
    """
    power = 1 << (max(tokens, chunk_size) - 1).bit_length()
    unit = min(max(64, power // 32), power)
    return -(-tokens // unit) * unit
