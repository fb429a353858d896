"""The walk of the forward kernels over the chunks of a super-chunk: which threads load, which compute.

With `warp_specialize` one more warp issues every copy of a ring of slots and the others compute; else all threads do
both. Optional tensors of a program are annotated with `given`.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812, PLR0913, PLR0917

from dataclasses import replace
from typing import Any, NamedTuple

import tilelang.language as T

from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces.loads import Loads, make_loads, panels

LOADERS = 32
"""Threads of the loading warp."""


def given(there: bool, shape: tuple[int, ...], dtype: str) -> Any:
    """Return the annotation of a tensor that a program takes only when `there`; else its name is False in it."""
    return T.Tensor(shape, dtype) if there else False


def staged(there: bool, shape: tuple[int, ...], dtype: str) -> Any:
    """Allocate a buffer in shared memory that a program has only when `there`."""
    return T.alloc_shared(shape, dtype) if there else None


def threads_for(s: ScanShape) -> int:
    """Return how many threads compute: two warp groups when the state or the rows of a chunk are too much for one."""
    return 256 if s.N * s.P >= 128 * 128 or s.M == 128 else 128


class Walk(NamedTuple):
    """Threads and barriers of one walk."""

    loads: Loads
    threads: int
    """Threads that compute."""
    split: bool
    """Whether one more warp loads."""
    early: bool
    """Whether the copies of a chunk start at the begin of an earlier one, not in its middle."""
    ahead: int
    """Chunks in flight ahead of the arithmetic."""
    sync: Any
    """macro(): a barrier of the threads that compute."""
    release: Any
    """macro(empty, n): let the loading warp overwrite the slot of chunk n."""
    acquire: Any
    """macro(empty, n): wait until the slot of chunk n may be overwritten."""

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads + LOADERS if self.split else self.threads

    def full(self) -> Any:
        """Allocate the barriers that say that a slot is loaded."""
        return self.loads.barriers(LOADERS if self.split else self.threads)

    def empty(self) -> Any:
        """Allocate the barriers that say that a slot is free; without a loading warp there are none."""
        return T.alloc_barrier([self.threads] * self.loads.slots) if self.split else None

    def computes(self, tx: Any) -> Any:
        """Return whether thread tx computes."""
        return tx < self.threads if self.split else True


def make_walk(s: ScanShape, v: Variant, *, small: bool = False) -> Walk:
    """Return the walk of a forward kernel of `s` behind the gates of `v`.

    The loads of a kernel whose tiles are `small` have one more slot, so that the copies of a chunk start a whole chunk
    before it, not when the chunk before it has been read: there is little arithmetic to hide them behind.
    """
    early = small and v.pipeline_stages > 0 and not v.warp_specialize
    ahead = v.pipeline_stages + early
    loads, threads, split = make_loads(s, replace(v, pipeline_stages=ahead)), threads_for(s), v.warp_specialize
    slots = loads.slots

    @T.macro
    def sync():
        if split:
            T.sync_threads(1, threads)
        else:
            T.sync_threads()

    @T.macro
    def release(empty, n):
        T.mbarrier_arrive(empty[n % slots])

    @T.macro
    def acquire(empty, n):
        T.mbarrier_wait_parity(empty[n % slots], n // slots % 2 ^ 1)

    return Walk(loads, threads, split, early, v.pipeline_stages, sync, release, acquire)


def make_output_start(s: ScanShape, loads: Loads) -> tuple[Any, int]:
    """Return F3's macro that starts the copies of chunk n, and how many copies that are."""
    A, C, P = s.A, s.C, s.P

    @T.macro
    def start(q_raw, k_raw, v_s, z_s, cs_s, q, k, v, z, cs, full, b, h, n):
        t0, slot, held = n * C, loads.slot(n), loads.held_slot(n)
        loads.rows(q_raw, q, full, b, h, t0, n)
        loads.rows(k_raw, k, full, b, h, t0, n)
        loads.copy(v[b, t0 : t0 + C, h, :], v_s[slot * C : (slot + 1) * C, :], full, n)
        if s.gated:
            for cols in panels(P):
                loads.copy(z[b, t0 : t0 + C, h, cols], z_s[held * C : (held + 1) * C, cols], full, n)
        loads.copy(cs[b, h, t0 // C, :, :, :], cs_s[slot * (A // 4) : (slot + 1) * (A // 4), :, :], full, n)
        loads.posted(full, n)

    return start, 2 * s.R * len(loads.columns()) + 2 + s.gated * len(panels(P))
