"""How the walk of B3 in the lifted form goes on: from chunk to chunk, from head to head, and who copies.

A block takes `in_turn` heads of a group one after another, every chunk of each from the last to the first: one row of
steps, so that copies run ahead over a head's end. With `warp_specialize` a warp group of its own copies, as far ahead
as there are slots, and the others say when they have read one. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.lifted_layout import groups_of
from kernels.mamba3_mimo.cuda.machine import GROUP
from kernels.mamba3_mimo.cuda.pieces.loads import Loads
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant

COPYING_REGISTERS = 24
"""Registers of a thread of the warp group that copies."""


def computing(s: ScanShape) -> int:
    """Return the threads that compute, the first ones of a block."""
    return groups_of(s) * GROUP


def threads_of(s: ScanShape, v: Variant) -> int:
    """Return the threads of a block."""
    return computing(s) + v.warp_specialize * GROUP


def computing_registers(s: ScanShape) -> int:
    """Return how many registers a thread that computes can have beside the warp group that copies."""
    return 232 if groups_of(s) == 1 else 240


@dataclass(frozen=True, kw_only=True)
class CopyPace:
    """The steps of a block."""

    head: Any
    """Function(step) -> the head that it belongs to."""
    in_turn: Any
    """How many heads it takes."""
    steps: Any
    """All chunks of all its heads."""
    meet: Any
    """Function(): the threads that compute wait for each other."""
    begin: Any
    """macro(tx): start the copies of the first steps."""
    entered: Any
    """macro(step, tx): where no copies run ahead, those of this step are started and nothing else."""
    released: Any
    """macro(step, tx): everybody has read the slots of this step; those of a later one are filled."""
    copies: Any
    """macro(tx): what the warp group that copies does."""


def make_pace(s: ScanShape, v: Variant, loads: Loads, start: Any, free: Any, b: Any, i: Any, in_turn: Any) -> CopyPace:
    """Return the pace of block (i, b), which takes `in_turn` heads.

    `start` is that of gradients_io.make_start, `free` a barrier for every slot.
    """
    nc, ahead = s.chunks, loads.ahead
    steps, roles, threads = in_turn * nc, v.warp_specialize, computing(s)

    def meet() -> None:
        T.evaluate(T.sync_threads(1, threads) if roles else T.sync_threads())

    def head(step: Any) -> Any:  # the rest changes nothing: the compiler sees a contiguous copy of cs
        return (i * in_turn + step // nc) % s.H

    @T.macro
    def copied(step, tx):
        start(b, head(step), (nc - 1 - step % nc) * s.C, step, tx)

    @T.macro
    def begin(tx):
        if not roles:
            for step in tuple(range(ahead)):
                if step < nc:
                    copied(step, tx)
                else:
                    if step < steps:
                        copied(step, tx)

    @T.macro
    def entered(step, tx):
        if ahead == 0:
            copied(step, tx)

    @T.macro
    def released(step, tx):
        if roles:
            T.mbarrier_arrive(free[loads.slot(step)])
        else:
            if ahead > 0 and step + ahead < steps:
                copied(step + ahead, tx)

    @T.macro
    def copies(tx):
        for step in T.serial(steps):
            T.mbarrier_wait_parity(free[loads.slot(step)], (step // loads.slots + 1) % 2)
            copied(step, tx)

    return CopyPace(
        head=head,
        in_turn=in_turn,
        steps=steps,
        meet=meet,
        begin=begin,
        entered=entered,
        released=released,
        copies=copies,
    )
