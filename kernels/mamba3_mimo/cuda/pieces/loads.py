"""Loads of a walk's tiles from global memory into staging buffers in shared memory. Three gates change them.

- `tma`: bulk tensor copies that report to mbarriers; off: cp.async groups.
- `pipeline_stages`: number of chunks in flight ahead of the arithmetic.
- `layout_2d`: q and k staged as swizzled [M,N] tiles; off: as plain [R,C,N] tiles.

A walk over chunks n = 0 .. nc - 1 uses one `Loads` like this::

    loads = make_loads(s, v)
    @T.macro
    def start(n):                                  # every copy of chunk n, the last one followed by `posted`
        loads.rows(raw_s, k, bar, b, h, t0_of(n), n)   # all ranks in one copy
        loads.copy(states[b, h, chunk_of(n), :, :], h_s[loads.slot(n), :, :], bar, n)
        loads.posted(bar, n)
    raw_s, bar = loads.tile(), loads.barriers(threads)
    T.annotate_layout(loads.layouts(raw_s))
    for n in range(loads.ahead):                   # Python's range: unrolled
        if n < nc:
            start(n)
    for n in T.serial(nc):
        if loads.ahead == 0:
            start(n)
        loads.wait(bar, n, nc, copies=2)           # `copies`: number in `start` (rows: len(loads.columns()))
        ... raw_s[loads.at(n, i, column)] ...      # row i = r * C + c
        if loads.ahead > 0:
            T.sync_threads()                       # every thread has read the slot
            if n + loads.ahead < nc:
                start(n + loads.ahead)
        ... code that still reads the chunk uses buffers with `loads.held` slots: loads.held_slot(n) ...
        if loads.ahead == 0:
            T.sync_threads()
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import swizzled_lines
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant


def panels(width: int, panel: int = 64) -> list[slice]:
    """Return the columns of each bulk copy into some rows of a swizzled bf16 tile: one line of 128 bytes per copy.

    A wider tile consists of panels of such lines, one after the other, so some of its rows are not contiguous.
    """
    return [slice(first, min(first + panel, width)) for first in range(0, width, panel)]


def by_rank(tensor: Any) -> Any:
    """Return a view of a tensor [B,S,R,heads,width] as [B,R,S,heads,width], the order (rank, time) of a tile's rows.

    One bulk copy then moves all ranks of a chunk.
    """
    order = (0, 2, 1, 3, 4)
    return T.view(tensor, [tensor.shape[i] for i in order], strides=[tensor.strides[i] for i in order])


def ranks_of(tile: Any, C: int) -> Any:
    """Return a view of a tile with rows (rank, time) as [ranks of all slots,C,width], the form of a plain tile."""
    rows, *_, width = tile.shape
    return T.view(tile, (rows // C, C, width)) if len(tile.shape) == 2 else tile


@dataclass(frozen=True)
class Staging:
    """Positions of a walk's staged tiles."""

    s: ScanShape
    tma: bool
    two_d: bool
    ahead: int
    """Chunks in flight ahead of the arithmetic."""

    @property
    def slots(self) -> int:
        """Staging slots of tiles that are read until the next chunk's copies start."""
        return max(1, self.ahead)

    @property
    def held(self) -> int:
        """Staging slots of tiles that are read until the end of their chunk."""
        return self.ahead + 1

    def slot(self, n: Any) -> Any:
        """Return the slot of chunk n."""
        return n % self.slots if self.slots > 1 else 0

    def held_slot(self, n: Any) -> Any:
        """Return the slot of chunk n among `held`."""
        return n % self.held if self.held > 1 else 0

    def tile(self) -> Any:
        """Allocate the staging buffer of q or k."""
        s = self.s
        return T.alloc_shared((self.slots * s.M, s.N) if self.two_d else (self.slots * s.R, s.C, s.N), BF16)

    def at(self, n: Any, row: Any, column: Any) -> tuple[Any, ...]:
        """Return the index of [row, column] of chunk n in a buffer of `tile`."""
        s, slot = self.s, self.slot(n)
        if self.two_d:
            return slot * s.M + row, column
        return slot * s.R + row // s.C, row % s.C, column

    def ranks(self, n: Any) -> slice:
        """Return the index of chunk n in a staged tile viewed by ranks."""
        return slice(self.slot(n) * self.s.R, (self.slot(n) + 1) * self.s.R)

    def columns(self) -> list[slice]:
        """Return the columns of each copy of a chunk of q or k. A plain tile needs one copy."""
        return panels(self.s.N) if self.two_d else [slice(0, self.s.N)]

    def barriers(self, threads: int) -> Any:
        """Allocate the mbarriers. cp.async has its own groups and needs none."""
        return T.alloc_barrier([threads] * self.slots) if self.tma else None

    def layouts(self, *tiles: Any) -> dict[Any, Any]:
        """Return the layout annotations of the staging buffers: swizzled if two-dimensional, else none."""
        return {tile: swizzled_lines(tile) for tile in tiles} if self.two_d else {}


@dataclass(frozen=True)
class Loads(Staging):
    """The loads of one walk, see the module."""

    copy: Any
    """macro(source region, target region, bar, n): start one copy of chunk n."""
    ranks_in: Any
    """macro(tile, tensor [B,S,R,heads,width], columns, bar, b, head, t0, n): start a copy of all ranks of one chunk for
    each of `columns`, into a tile with rows (rank, time)."""
    rows: Any
    """macro(raw_s, raw [B,S,R,G,N], bar, b, h, t0, n): the same for q or k."""
    posted: Any
    """macro(bar, n): call it after the last copy of chunk n."""
    wait: Any
    """macro(bar, n, nc, copies): wait until all copies of chunk n are complete and all threads may read them."""


def make_loads(s: ScanShape, v: Variant) -> Loads:
    """Return the loads of a walk over chunks of `s` with the gates of `v`."""
    C, per_group = s.C, s.heads_per_group
    place = Staging(s, v.tma, v.layout_2d, v.pipeline_stages)
    tma, ahead, slots = place.tma, place.ahead, place.slots

    @T.macro
    def copy(source, target, bar, n):
        if tma:
            T.tma_copy(source, target, barrier=bar[n % slots])
        else:
            T.async_copy(source, target, coalesced_width=8 if source.buffer.dtype == BF16 else 4)

    @T.macro
    def ranks_in(tile, tensor, columns, bar, b, head, t0, n):
        for cols in columns:
            copy(by_rank(tensor)[b, :, t0 : t0 + C, head, cols], ranks_of(tile, C)[place.ranks(n), :, cols], bar, n)

    @T.macro
    def rows(raw_s, raw, bar, b, h, t0, n):
        ranks_in(raw_s, raw, place.columns(), bar, b, h // per_group, t0, n)

    @T.macro
    def posted(bar, n):
        if tma:
            T.mbarrier_arrive(bar[n % slots])

    @T.macro
    def wait(bar, n, nc, copies):
        if tma:
            T.mbarrier_wait_parity(bar[n % slots], n // slots % 2)
        else:
            if ahead > 1:
                if n + ahead - 1 < nc:
                    T.ptx_wait_group(copies * (ahead - 1))
                else:
                    T.ptx_wait_group(0)
            else:
                T.ptx_wait_group(0)
            # matrix instructions read shared memory through another proxy than the one that the copies write through
            T.fence_proxy_async()
            T.sync_threads()

    return Loads(s, tma, place.two_d, ahead, copy, ranks_in, rows, posted, wait)


def make_store(v: Variant) -> tuple[Any, Any]:
    """Return (macro(tile, out): start to write a tile, macro(): wait until the written tiles may change).

    With bulk copies one thread reads the tile after a proxy fence and a barrier, otherwise every thread its part.
    """

    @T.macro
    def store(tile, out):
        if v.tma:
            T.tma_copy(tile, out)
        else:
            T.copy(tile, out, disable_tma=True)

    @T.macro
    def stored():
        if v.tma:
            T.tma_store_wait(0)

    return store, stored
