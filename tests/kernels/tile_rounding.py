"""The tile interpreter with the rounding of a GPU: whatever is stored or cast becomes a number of its buffer's type.

Sums are still taken in float64, in another order than on a GPU, and fast functions are exact: results are as far from
the reference as those of a GPU, but not equal to them.
"""

from typing import Any

import numpy as np
import torch

from tests.kernels import tile_interpreter
from tests.kernels.tile_interpreter import Buffer, Machine

TYPES = ("bfloat16", "float16", "float32")


def rounded(value: Any, dtype: str) -> Any:
    """Return float64 numbers that `dtype` holds; other types than those of `TYPES` are left alone."""
    if dtype not in TYPES:
        return value
    narrow = np.asarray(value, np.float32)
    if dtype == "bfloat16":  # to the nearest, ties to even: half of the last place that is kept, and its own bit
        bits = narrow.view(np.uint32)
        narrow = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    elif dtype == "float16":
        narrow = narrow.astype(np.float16)
    return narrow.astype(np.float64)[()]


class RoundedBuffer(Buffer):
    """Memory whose numbers have a type."""

    dtype = "float32"

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, rounded(value, self.dtype))

    def add(self, index: Any, value: Any) -> None:
        """Add to elements."""
        super().add(index, value)
        if self.name == "local.fragment":  # the others were rounded by __setitem__
            self.data[...] = rounded(self.data, self.dtype)


class RoundingMachine(Machine):
    """The meaning of `T` with rounding."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.types: dict[int, tuple[str, Any]] = {}
        """Address of an array -> its type, and the array, which must live for the address to be its own."""

    def match_buffer(self, handle: Any, shape: Any, dtype: str = "float32", **named: Any) -> Buffer:
        handle[...] = rounded(handle, dtype)
        return self._typed(super().match_buffer(handle, shape, dtype, **named), dtype)

    def sblock_alloc_buffer(
        self, shape: Any, dtype: str = "float32", *, data: Any = None, scope: str = "global"
    ) -> Any:
        made = super().sblock_alloc_buffer(shape, dtype, data=data, scope=scope)
        if not isinstance(made, Buffer):
            return made
        buffer = self._typed(made, dtype)
        if data is not None:
            data.buffer = buffer
        return buffer

    def Buffer(self, shape: Any, *rest: Any, data: Any, **named: Any) -> Buffer:  # noqa: N802
        view = super().Buffer(shape, *rest, data=data, **named)
        return self._typed(view, self._type(view.data))

    def _typed(self, buffer: Buffer, dtype: str) -> Buffer:
        typed = RoundedBuffer(buffer.machine, buffer.name, buffer.data, local=buffer.local)
        typed.dtype = dtype
        owner = _owner(buffer.data)
        self.types[id(owner)] = (dtype, owner)
        return typed

    def _type(self, array: Any) -> str:
        return self.types[id(_owner(array))][0]

    def _round(self, target: Any) -> None:
        target[...] = rounded(target, self._type(target))

    def copy(self, source: Any, target: Any, **named: Any) -> None:
        super().copy(source, target, **named)
        self._round(target)

    def gemm(self, a: Any, b: Any, c: Any, *rest: Any, **named: Any) -> None:
        super().gemm(a, b, c, *rest, **named)
        self._round(c)

    wgmma_gemm = gemm

    def reduce(self, source: Any, target: Any, *rest: Any, **named: Any) -> None:
        super().reduce(source, target, *rest, **named)
        self._round(target)

    def cumsum(self, source: Any, target: Any, *rest: Any) -> None:
        super().cumsum(source, target, *rest)
        self._round(target)

    def Cast(self, dtype: str, value: Any) -> Any:  # noqa: N802
        return rounded(value, dtype) if dtype in TYPES else super().Cast(dtype, value)

    def float32(self, value: Any) -> float:
        return float(rounded(value, "float32"))

    def float16(self, value: Any) -> float:
        return float(rounded(value, "float16"))

    def bfloat16(self, value: Any) -> float:
        return float(rounded(value, "bfloat16"))


def _owner(array: Any) -> Any:
    """Return the array that holds the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def run(program: Any, *tensors: torch.Tensor) -> None:
    """Run a TileLang program as `tile_interpreter.run` does, with rounding."""
    tile_interpreter.run(program, *tensors, machine=RoundingMachine)
