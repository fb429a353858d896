"""How many tokens one block walks. Rows are padded to a multiple of it, and each length needs its own kernels.

The time of a pass is the number of waves that the processors need for all blocks, times the length of a walk and a
block's overhead. If one block walks a whole row, three kernels fewer are launched.
"""

from dataclasses import replace
from functools import lru_cache

from ablate.kernels.mamba3_mimo.cuda.shape import PROCESSORS, Variant

LENGTHS = (64, 256, 1024)
"""Super-chunks to choose from: few, so that few kernels are compiled for all lengths and batches."""
ROWS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Walks over a whole row to choose from, few for the same reason."""
OVERHEAD = 7
"""Tokens that a block could walk in the time of its start and end, from the times of super-chunks of 256 and 1024
tokens."""
STATES_FACTOR = 9 / 8
"""Time of a pass that first computes and passes on the states of its super-chunks, relative to a pass without."""


@lru_cache(maxsize=1024)
def choose_walk(variant: Variant, *, rows: int, tokens: int, state: int) -> Variant:
    """Return the variant with its open choice made: a super-chunk, or one block per row if that is faster.

    The scan has `rows` = B * H rows of `tokens` tokens and a state of `state` = N * P numbers.
    """
    if variant.schedule != "chunk_parallel" or variant.superchunk != 0:
        return variant

    def time(length: int) -> int:
        return -(-rows * -(-tokens // length) // blocks_at_once(state)) * (length + OVERHEAD)

    possible = [length for length in LENGTHS if length >= 4 * variant.chunk_size]  # a limit of some forms of the walk
    best = min(possible, key=lambda length: (time(length), -length))
    whole = _row_length(tokens, variant.chunk_size)
    if whole in ROWS and whole >= 4 * variant.chunk_size and time(whole) < STATES_FACTOR * time(best):
        return replace(variant, schedule="sequential")
    return replace(variant, superchunk=best)


def blocks_at_once(state: int) -> int:
    """Return how many blocks of the backward walk run at once with a state of `state` = N * P numbers."""
    return PROCESSORS * (2 if state <= 64 * 64 else 1)


def walk_length(variant: Variant, tokens: int) -> int:
    """Return L for rows of `tokens` tokens and a variant without open choices."""
    return variant.superchunk if variant.schedule == "chunk_parallel" else _row_length(tokens, variant.chunk_size)


def _row_length(tokens: int, chunk_size: int) -> int:
    """Return the length of a walk over a whole row: sixteen lengths to an octave, so that few kernels are compiled.

    It is a power of two up to 64, then a multiple of 64. The padding is less than 64 tokens or a sixteenth.
    """
    power = 1 << (max(tokens, chunk_size) - 1).bit_length()
    unit = min(max(64, power // 32), power)
    return -(-tokens // unit) * unit
