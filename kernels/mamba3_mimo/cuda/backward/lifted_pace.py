"""Who copies in the walk of B3 in the lifted form, and when: all threads, or a warp group that does nothing else.

With `warp_specialize` that group runs as far ahead as there are slots, and the others say when they have read one.
Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kernels.mamba3_mimo.cuda.backward.lifted_places import groups_of
from kernels.mamba3_mimo.cuda.host.machine import GROUP
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces.loads import Loads

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
class Pace:
    """When chunks are copied."""

    meet: Any
    """Function(): the threads that compute wait for each other."""
    begin: Any
    """macro(tx): start the copies of the first chunks."""
    entered: Any
    """macro(n, tx): where no copies run ahead, those of chunk n are started, and nothing else is done."""
    released: Any
    """macro(n, tx): everybody has read the slots of chunk n; those of a later one are filled."""
    copies: Any
    """macro(tx): what the warp group that copies does."""


def make_pace(s: ScanShape, v: Variant, loads: Loads, start: Any, free: Any, b: Any, h: Any) -> Pace:
    """Return the pace of walk b of head h; `start` is that of gradients_io.make_start, `free` a barrier a slot."""
    nc, ahead, roles, threads = s.chunks, loads.ahead, v.warp_specialize, computing(s)

    def meet() -> None:
        T.evaluate(T.sync_threads(1, threads) if roles else T.sync_threads())

    @T.macro
    def copied(n, tx):
        start(b, h, (nc - 1 - n) * s.C, n, tx)

    @T.macro
    def begin(tx):
        for n in tuple(range(0 if roles else min(ahead, nc))):
            copied(n, tx)

    @T.macro
    def entered(n, tx):
        if ahead == 0:
            copied(n, tx)

    @T.macro
    def released(n, tx):
        if roles:
            T.mbarrier_arrive(free[loads.slot(n)])
        else:
            if ahead > 0 and n + ahead < nc:
                copied(n + ahead, tx)

    @T.macro
    def copies(tx):
        for n in T.serial(nc):
            T.mbarrier_wait_parity(free[loads.slot(n)], (n // loads.slots + 1) % 2)
            copied(n, tx)

    return Pace(meet=meet, begin=begin, entered=entered, released=released, copies=copies)
