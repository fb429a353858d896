"""Instructions of the matrix unit on registers, for the interpreter: which thread holds which element.

Registers of a program are arrays [threads, elements]. Tiles in shared memory are arrays [rows, columns]; a descriptor
addresses one as the hardware does, in lines of 128 bytes: 64 bfloat16 columns of every row, then the next 64 columns.
"""

from typing import Any

import numpy as np

LINE = 128
"""Bytes of a line of a swizzled tile."""
COLUMNS = 64
"""Columns of bfloat16 in a line."""


class Pointer:
    """An element of a buffer, per thread."""

    def __init__(self, buffer: Any, index: Any) -> None:
        self.data, self.index = buffer.data, index if isinstance(index, tuple) else (index,)

    def rows(self, height: int, width: int) -> Any:
        """Return `height` rows of `width` columns from an element that is the same for every thread."""
        first, column = (int(np.asarray(at).ravel()[0]) for at in self.index)
        return self.data[first : first + height, column : column + width]


class TensorMap:
    """How the copy engine addresses boxes of a tensor."""

    def __init__(self, tensor: Any, box: tuple[int, ...]) -> None:
        self.tensor, self.box = tensor, box

    def part(self, at: tuple[Any, ...]) -> Any:
        """Return the box that begins `at`."""
        first = [int(np.asarray(i).ravel()[0]) for i in at]
        assert all(i >= 0 and i + n <= size for i, n, size in zip(first, self.box, self.tensor.shape, strict=True))
        return self.tensor[tuple(slice(i, i + n) for i, n in zip(first, self.box, strict=True))]


class Descriptor:
    """Where the matrix unit reads an operand in shared memory; the only element of its own buffer."""

    def __init__(self) -> None:
        self.tile: Any = None
        self.offset = self.stride = 0
        self.data = self

    def __getitem__(self, _: Any) -> "Descriptor":
        return self

    def begin(self, tile: Any, stride: int) -> None:
        """Address a tile whose blocks of 8 rows lie `stride` * 16 bytes apart."""
        self.tile, self.offset, self.stride = tile, 0, stride * 16 // LINE

    def rows(self, offset: Any, height: int, width: int) -> Any:
        """Return `height` rows of `width` columns that begin `offset` * 16 bytes behind the descriptor."""
        line, within = divmod(self.offset + int(offset) * 16, LINE)
        panel, first = divmod(line, self.tile.shape[0])
        rows = first + np.arange(height) // 8 * self.stride + np.arange(height) % 8
        column = panel * COLUMNS + within // 2
        return self.tile[rows, column : column + width]

    def operand(self, offset: Any, width: int, *, depth_last: bool) -> Any:
        """Return an operand [16, width], stored so or, with `depth_last`, as [width, 16]."""
        return self.rows(offset, width, 16).T if depth_last else self.rows(offset, 16, width)


def load_matrices(source: Pointer, target: Pointer, count: int, turned: bool, active: Any) -> None:
    """ldmatrix: thread t of a warp gives row t % 8 of matrix t // 8; element pairs of all matrices go to the registers.

    Thread t receives columns 2 * (t % 4) and the next of row t // 4 of every matrix, or of its transpose if `turned`.
    """
    threads = active.shape[0]
    places = [np.broadcast_to(np.asarray(i), active.shape).ravel() for i in source.index]
    columns = [place[:, None] for place in places[:-1]] + [places[-1][:, None] + np.arange(8)]
    inside = [np.clip(place, 0, size - 1) for place, size in zip(columns, source.data.shape, strict=True)]
    matrices = source.data[tuple(inside)].reshape(threads // 32, 32 // 8, 8, 8)[:, :count]
    if turned:
        matrices = matrices.swapaxes(2, 3)
    # [warp, matrix, row, pair, element] -> [warp, row, pair, matrix, element]: row and pair make the thread
    loaded = matrices.reshape(-1, count, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(threads, 2 * count)
    first, chosen = int(np.asarray(target.index[0]).ravel()[0]), active.ravel()
    target.data[chosen, first : first + 2 * count] = loaded[chosen]


def store_matrices(target: Pointer, pairs: Any, turned: bool, active: Any) -> None:
    """stmatrix: what `load_matrices` would read; register i of all threads of a warp is matrix i."""
    threads, count = active.shape[0], len(pairs)
    places = [np.broadcast_to(np.asarray(i), active.shape).reshape(-1, 4, 8)[:, :count] for i in target.index]
    elements = [np.broadcast_to(np.asarray(e), active.shape).ravel() for pair in pairs for e in pair]
    # [matrix, element, warp, row, pair] -> [warp, matrix, row, column]
    matrices = np.stack(elements).reshape(count, 2, threads // 32, 8, 4).transpose(2, 0, 3, 4, 1)
    matrices = matrices.reshape(threads // 32, count, 8, 8)
    if turned:
        matrices = matrices.swapaxes(2, 3)
    warps = np.flatnonzero(active.ravel()[::32])  # a warp stores as a whole
    index = [place[warps, ..., None] for place in places[:-1]] + [places[-1][warps, ..., None] + np.arange(8)]
    target.data[tuple(index)] = matrices[warps]


def from_registers(a: Any, first: int, threads: Any) -> Any:
    """Return left operands [groups of 128 threads, 64, 16] of the matrix unit, 8 elements of every thread.

    Thread t of warp w holds rows 16 * w + t // 4 and 8 below, columns 2 * (t % 4) and the next of every 8 columns, in
    the order (block of 8 columns, row, column).
    """
    groups = threads.size // 128
    left = a[threads, first : first + 8].reshape(groups, 4, 8, 4, 2, 2, 2)
    # [group, warp, row, pair, block of columns, block of rows, element] -> rows of the group, columns
    return left.transpose(0, 1, 5, 2, 4, 3, 6).reshape(groups, 64, 16)


def accumulate(c: Any, first: int, threads: Any, product: Any, *, keep: bool) -> None:
    """Add products [groups, 64, n] to the registers of the threads, or replace them; order as in `from_registers`."""
    groups, width = threads.size // 128, product.shape[-1]
    parts = np.broadcast_to(product, (groups, 64, width)).reshape(groups, 4, 2, 8, width // 8, 4, 2)
    added = parts.transpose(0, 1, 3, 5, 4, 2, 6).reshape(-1, width // 2)
    place = (threads, slice(first, first + width // 2))
    c[place] = c[place] + added if keep else added
