"""Three chained products of small bfloat16 matrices, Y = ((A @ B) @ C) @ D: by torch.bmm, and in CuTe DSL.

Sums are float32 and every product is rounded to bfloat16. The kernel in CuTe DSL computes the chain in one launch, or
one product per launch. It follows an article that reports about 36 us for one launch, 64 us for three, and 36 us for
three launches of torch.bmm on an H200. The article does not name its sizes, so `CHAINS` are ours.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeAlias

import torch
from torch import Tensor

from ablate.kernels.errors import KernelUnsupported
from tests.kernels.accuracy import poisoned_buffers

WIDTHS = (64, 128)
"""Columns of A and of every right operand that the kernel supports."""
ROW_STEP = 64
"""The rows of A must be a multiple of this, the rows of a warpgroup."""
ALIGNMENT = 16
"""Bytes to which the operands must be aligned for TMA."""
BMM, ONE_LAUNCH, THREE_LAUNCHES = "torch.bmm, three launches", "CuTe DSL, one launch", "CuTe DSL, three launches"
VARIANTS = (BMM, THREE_LAUNCHES, ONE_LAUNCH)
CALLS = 20
"""Chains in one sample, because one chain is too short to time between two events."""
LARGEST, NORM = 2**-6, 1e-3
"""Limits of the errors of `errors`. A chain in float32 has norms of 0.0001, one without roundings in between 0.003."""

Operands: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]
"""A, bfloat16 (batch, rows, width), and right operands, bfloat16 (batch, width, width)."""


@dataclass(frozen=True, kw_only=True)
class ChainCase:
    """Sizes of one chain."""

    name: str
    """Row heading."""
    batch: int
    rows: int
    """Rows of A and Y."""
    width: int
    """Columns of A, and rows and columns of B, C and D."""
    products: int = 3
    seed: int = 0


CHAINS = (
    ChainCase(name="64 of 64 x 64", batch=64, rows=64, width=64),
    ChainCase(name="1024 of 64 x 64", batch=1024, rows=64, width=64),
    ChainCase(name="256 of 128 x 128", batch=256, rows=128, width=128),
)
"""Timed chains. The first is a few microseconds of work, the others move 42 MB in one launch."""


def make_operands(case: ChainCase, device: str = "cuda") -> Operands:
    """Return random operands. Right operands are scaled so that results are about 1."""
    gen = torch.Generator(device=device).manual_seed(case.seed)

    def drawn(rows: int) -> Tensor:
        return torch.randn(case.batch, rows, case.width, generator=gen, device=device)

    left = drawn(case.rows).bfloat16()
    return left, tuple((drawn(case.width) / case.width**0.5).bfloat16() for _ in range(case.products))


def exact(left: Tensor, rights: Iterable[Tensor]) -> Tensor:
    """Return the chain in float64, with every product rounded to bfloat16 as its definition demands."""
    product = left.double()
    for right in rights:
        product = (product @ right.double()).bfloat16().double()
    return product


def errors(result: Tensor, want: Tensor) -> tuple[float, float]:
    """Return the largest error as a share of the largest value, and the norm of the error as a share of the norm."""
    difference = result.double() - want
    return (difference.abs().max() / want.abs().max()).item(), (difference.norm() / want.norm()).item()


def wrong(largest: float, norm: float) -> bool:
    """Return whether errors are above the limits, or NaN."""
    return not (largest < LARGEST and norm < NORM)


def refusal(left: Tensor, rights: tuple[Tensor, ...]) -> str | None:
    """Return why the kernel cannot multiply these operands here, or None."""
    return _wrong_operands(left, rights) or _wrong_machine(left)


def _wrong_operands(left: Tensor, rights: tuple[Tensor, ...]) -> str | None:
    tensors = (left, *rights)
    if {tensor.dtype for tensor in tensors} != {torch.bfloat16}:
        return f"dtypes are {_listed(tensor.dtype for tensor in tensors)}; supported: torch.bfloat16"
    if left.dim() != 3 or left.shape[2] not in WIDTHS or left.shape[1] % ROW_STEP or left.shape[1] == 0:
        return f"A is {tuple(left.shape)}; supported: (batch, a multiple of {ROW_STEP}, one of {WIDTHS})"
    square = (left.shape[0], left.shape[2], left.shape[2])
    if {tuple(right.shape) for right in rights} != {square}:
        return f"right operands are {_listed(tuple(right.shape) for right in rights)}; supported: one or more {square}"
    if not all(tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors):
        return f"an operand is not contiguous or not aligned to {ALIGNMENT} bytes"
    if len({tensor.device for tensor in tensors}) > 1:
        return f"operands are on {_listed(tensor.device for tensor in tensors)}; supported: one device"
    return None


def _wrong_machine(left: Tensor) -> str | None:
    if not left.is_cuda or torch.cuda.get_device_capability(left.device) != (9, 0):
        return f"operands are on {left.device}; supported: a GPU of compute capability 9.0"
    return None if find_spec("cutlass") else "nvidia-cutlass-dsl is not installed"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"


def runner(variant: str, left: Tensor, rights: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """Return a function that computes the chain. Raises KernelUnsupported with the reason if the variant cannot."""
    if variant == BMM:
        return lambda: one_by_one(torch.bmm, left, rights)
    reason = refusal(left, rights)
    if reason is not None:
        raise KernelUnsupported(f"{variant}: {reason}")
    if left.shape[0] == 0:
        return lambda: torch.empty_like(left)
    from tests.kernels.bench import cute_chain  # lazy: it imports cutlass

    if variant == ONE_LAUNCH:
        return lambda: cute_chain.chained(left, rights)
    return lambda: one_by_one(lambda product, right: cute_chain.chained(product, (right,)), left, rights)


def one_by_one(multiply: Callable[[Tensor, Tensor], Tensor], left: Tensor, rights: Iterable[Tensor]) -> Tensor:
    """Return the chain with one call of `multiply` per product."""
    product = left
    for right in rights:
        product = multiply(product, right)
    return product


def result_of(variant: str, left: Tensor, rights: tuple[Tensor, ...]) -> Tensor:
    """Return the result of a variant. New buffers of the kernel contain NaN before it writes them."""
    run = runner(variant, left, rights)
    if variant == BMM:  # in this mode torch refuses products of cuBLAS
        return run()
    with poisoned_buffers():
        return run()
