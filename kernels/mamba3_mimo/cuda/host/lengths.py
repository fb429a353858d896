"""How many tokens one block walks. Rows are padded to a multiple of it, and every length of a walk is a set of kernels.

A pass takes about as long as its blocks take in turn: as many waves as the processors need for all of them, each as
long as one walk and what a block does besides.
"""

from kernels.mamba3_mimo.cuda.host.variant import Variant

LENGTHS = (64, 256, 1024)
"""Super-chunks to choose from: few, so that few kernels are compiled whatever lengths and batches come."""
PROCESSORS = 132
"""Of an H100 or H200."""
BESIDES = 7
"""Tokens that a block could walk in the time that it needs for its begin and end and for its state to be handed on; from
the times of super-chunks of 256 and 1024 tokens."""


def walked(*, rows: int, tokens: int, state: int, variant: Variant) -> int:
    """Return L for `rows` = B * H rows of `tokens` tokens with a state of `state` = N * P numbers."""
    if variant.schedule != "chunk_parallel":
        return _bucket(tokens, variant.chunk_size)
    return variant.superchunk or suited(rows=rows, tokens=tokens, state=state, chunk_size=variant.chunk_size)


def suited(*, rows: int, tokens: int, state: int, chunk_size: int) -> int:
    """Return the super-chunk that takes the least time, the longest of them, of at least four chunks."""
    lengths = (length for length in LENGTHS if length >= 4 * chunk_size)
    return min(lengths, key=lambda length: (_time(rows, tokens, state, length), -length))


def _time(rows: int, tokens: int, state: int, length: int) -> int:
    """Return the time of a pass, in tokens."""
    at_once = PROCESSORS * (2 if state <= 64 * 64 else 1)
    return -(-rows * -(-tokens // length) // at_once) * (length + BESIDES)


def _bucket(tokens: int, chunk_size: int) -> int:
    """Return the length of a walk over a whole row: sixteen to an octave, so that few kernels are compiled.

    It is a power of two up to 64 and then a multiple of 64; the padding is less than 64 tokens or a sixteenth.
    """
    power = 1 << (max(tokens, chunk_size) - 1).bit_length()
    unit = min(max(64, power // 32), power)
    return -(-tokens // unit) * unit
