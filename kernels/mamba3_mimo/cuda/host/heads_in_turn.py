"""How many heads of a group a block of the backward walk takes one after another, adding up their gradients of q and k.

Those of every head are as large as q and k are for all of them, and a kernel reads them again to add them up: with
four heads in turn it reads a quarter. The sums are rounded to bfloat16 after every head, so it is never many.
"""

from kernels.mamba3_mimo.cuda.backward.lifted_layout import lifts
from kernels.mamba3_mimo.cuda.host.lengths import at_once
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
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
