"""Steps of B3's walk in the lifted form over chunks and heads, and the threads that copy.

A block takes `in_turn` heads of a group in turn, with the chunks of each head from the last to the first. All form one
sequence of steps, so that copies run ahead across the end of a head. With `warp_specialize` a separate warp group
copies, as far ahead as there are slots, and the others report when they have read a slot. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import groups_of
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import Loads
from ablate.kernels.mamba3_mimo.cuda.shape import GROUP, ScanShape, Variant

COPYING_REGISTERS = 24
"""Registers of a thread of the warp group that copies."""


def computing(s: ScanShape) -> int:
    """Return the number of threads that compute, the first threads of a block."""
    return groups_of(s) * GROUP


def threads_of(s: ScanShape, v: Variant) -> int:
    """Return the threads of a block."""
    return computing(s) + v.warp_specialize * GROUP


def computing_registers(s: ScanShape) -> int:
    """Return the registers of a computing thread beside a warp group that copies."""
    return 232 if groups_of(s) == 1 else 240


@dataclass(frozen=True, kw_only=True)
class CopyPace:
    """The steps of a block."""

    head: Any
    """Function(step) -> its head."""
    in_turn: Any
    """Number of heads."""
    steps: Any
    """Number of chunks of all heads."""
    meet: Any
    """Function(): let the computing threads wait for each other."""
    begin: Any
    """macro(tx): start the copies of the first steps."""
    entered: Any
    """macro(step, tx): start the copies of this step if no copies run ahead."""
    released: Any
    """macro(step, tx): all threads have read this step's slots, so start the copies of a later step."""
    copies: Any
    """macro(tx): the work of the warp group that copies."""


def make_pace(s: ScanShape, v: Variant, loads: Loads, start: Any, free: Any, b: Any, i: Any, in_turn: Any) -> CopyPace:
    """Return the steps of block (i, b), which takes `in_turn` heads.

    `start` is the macro of gradients_io.make_start, `free` has a barrier for every slot.
    """
    nc, ahead = s.chunks, loads.ahead
    steps, roles, threads = in_turn * nc, v.warp_specialize, computing(s)

    def meet() -> None:
        T.evaluate(T.sync_threads(1, threads) if roles else T.sync_threads())

    def head(step: Any) -> Any:  # the modulus changes nothing, but shows the compiler a contiguous copy of cs
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
