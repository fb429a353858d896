"""The float64 reference, and the yardstick of errors, for problems of any size: some rows or heads at a time.

Rows meet in the gradients of the weights only, heads in those of what they share, so slices add up to the whole; and so
do the mean squares of their noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.mamba3_mimo.operands import psiv
from ablate.kernels.mamba3_mimo.reference import chunk_parallel
from tests.kernels import criterion
from tests.kernels.accuracy import AXES
from tests.kernels.criterion import Results, Yardstick
from tests.kernels.problem import outputs

SLICE_SIZE = 1 << 25
"""One row of 8192 tokens with 16 heads of 4 * 64: about 12 GB of float64 with all that autograd keeps."""


def reference(
    inputs: ScanInputs, grad_out: Tensor | None, grad_state: Tensor | None = None, *, slice_size: int = SLICE_SIZE
) -> Results:
    """Return output and final state in float64, with `grad_out` also every gradient.

    `grad_state` is the gradient of the final state, None where nobody uses it.
    `slice_size` is the most that a slice has of rows * tokens * heads * ranks * the wider of N and P.
    """
    results: Results = {}
    for places in _slices(inputs, slice_size):
        wide = places.inputs(inputs, torch.float64)
        grads = (("out", grad_out), ("state", grad_state))
        part = outputs(
            _chunk_parallel, wide, *(None if t is None else places.of(name, t).double() for name, t in grads)
        )
        places.add(part, results, inputs)
    return results


def yardstick(
    inputs: ScanInputs, grad_out: Tensor, *, gradients: bool = True, samples: int, slice_size: int = SLICE_SIZE
) -> Yardstick:
    """Return what criterion.yardstick does, for a problem of any size."""
    exact: Results = {}
    noise: Results = {}
    for places in _slices(inputs, slice_size):
        part, grad = places.inputs(inputs), places.of("out", grad_out)
        results, moved = criterion.noise_of_rows(part, grad, gradients=gradients, samples=samples)
        places.add(results, exact, inputs)
        for name, squares in moved.items():
            if name not in noise:
                noise[name] = squares.new_zeros(_squares_size(name, squares, exact[name]))
            places.squares(name, noise[name]).add_(squares)
    return Yardstick(exact, noise, criterion.carried(exact, noise, inputs, grad_out))


def _chunk_parallel(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    return chunk_parallel(inputs, psiv(inputs.v, inputs.psi), chunk_size=32)


def _squares_size(name: str, squares: Tensor, exact: Tensor) -> list[int]:
    """Return the size of the mean squares of all rows, from those of a part: see criterion.ROWS."""
    whole = [exact.shape[axis] for axis in criterion.ROWS[name]]
    return whole[: squares.dim()]


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """Some rows, groups and heads of a problem."""

    rows: slice
    groups: slice
    heads: slice

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the slice's part of the tensor or gradient `name`, a view."""
        index = [slice(None)] * tensor.dim()
        for axis, part in zip(AXES[name], (self.rows, self.groups, self.heads), strict=True):
            if axis is not None and not (name == "angles" and tensor.shape[axis] == 1 and part is self.heads):
                index[axis] = part
        return tensor[tuple(index)]

    def squares(self, name: str, tensor: Tensor) -> Tensor:
        """Return the slice's part of what has one number for each of criterion.ROWS, a view."""
        index = [slice(None)] * tensor.dim()
        rows, groups, heads = AXES[name]
        if rows is not None:
            index[0] = self.rows
        if groups is not None or (heads is not None and tensor.shape[-1] > 1):
            index[-1] = self.groups if groups is not None else self.heads
        return tensor[tuple(index)]

    def inputs(self, whole: ScanInputs, dtype: torch.dtype | None = None) -> ScanInputs:
        """Return the slice of a problem, without gradients, its tensors in `dtype` if there is one."""
        changes: dict[str, Tensor] = {}
        for name, tensor in zip(whole.names, whole.tensors(), strict=True):
            changes[name] = self.of(name, tensor.detach()).to(dtype or tensor.dtype)
        if whole.segment_ids is not None:
            changes["segment_ids"] = self.of("segment_ids", whole.segment_ids)
        return replace(whole, **changes)  # type: ignore[arg-type]

    def add(self, part: Results, results: Results, inputs: ScanInputs) -> None:
        """Add the results of the slice to those of the whole problem."""
        for name, tensor in part.items():
            if name not in results:
                results[name] = tensor.new_zeros(_size(name, tensor, inputs))
            self.of(name, results[name]).add_(tensor)


def _slices(inputs: ScanInputs, most: int) -> Iterator[_Slice]:
    """Yield slices that make up the whole problem, as few as `most` allows, at least one head of one row each."""
    batch, tokens, ranks, groups, state = inputs.q.shape
    heads, per_head = inputs.num_heads, tokens * ranks * max(state, inputs.v.shape[3])
    per_group, whole = heads // groups, slice(None)
    if heads * per_head <= most:
        rows = most // (heads * per_head)
        yield from (_Slice(rows=slice(b, b + rows), groups=whole, heads=whole) for b in range(0, batch, rows))
        return
    step = max(1, min(per_group, most // per_head))
    for row, group in product(range(batch), range(groups)):
        for head in range(group * per_group, (group + 1) * per_group, step):
            upto = min(head + step, (group + 1) * per_group)
            yield _Slice(rows=slice(row, row + 1), groups=slice(group, group + 1), heads=slice(head, upto))


def _size(name: str, part: Tensor, inputs: ScanInputs) -> list[int]:
    """Return the size of the whole tensor `name`, from a part of it."""
    size, whole = list(part.shape), (inputs.q.shape[0], inputs.num_groups, inputs.num_heads)
    for axis, full in zip(AXES[name], whole, strict=True):
        if axis is not None:
            size[axis] = full
    return list(inputs.angles.shape) if name == "angles" else size
