"""Around products of the matrix unit whose operands are registers: begin a batch of them, and wait for it.

Such products run on while a warp group does other work; the compiler must not move what touches their registers.
"""

from typing import Any

import tilelang.language as T  # noqa: N812 - the language's own name


def begin_batch(*touched: Any) -> None:
    """Begin a batch of products that read or write the registers `touched`; the caller commits the batch."""
    _fence(touched)
    T.evaluate(T.warpgroup_arrive())


def end_batch(running: int, *touched: Any) -> None:
    """Wait until at most `running` batches, those begun last, still run; the registers `touched` are theirs no more."""
    T.evaluate(T.warpgroup_wait(running))
    _fence(touched)


def _fence(touched: tuple[Any, ...]) -> None:
    for buffer in touched:
        T.warpgroup_fence_operand(buffer, num_regs=int(buffer.shape[0]) * buffer.dtype.bits // 32)
