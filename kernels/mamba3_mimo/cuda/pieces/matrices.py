"""Products of the matrix unit, and moves of its tiles between registers and shared memory as 8 x 8 matrices.

A thread of an accumulator [64,columns] of a warp group holds, of every 8 columns, 2 * (lane % 4) and the next, in the
rows 16 * warp + lane // 4 and 8 below: element block * 4 + lower * 2 + e. Rounded to bfloat16 in this order, 16 columns
are a left operand of the next product. Warp groups take the blocks of 8 columns in turn: block b of group u of `groups`
is the columns from (b * groups + u) * 8 on.

Products with operands in registers run on while a warp group does other work. The compiler must not move accesses to
their registers past `begin_batch` and `end_batch`.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: N812

from typing import Any

import tilelang.language as T
from tilelang.layout import Layout, make_swizzled_layout
from tvm.ir import Op

from ablate.kernels.mamba3_mimo.cuda.shape import GROUP


def swizzled_lines(tile: Any) -> Any:
    """Return the layout of a bf16 tile for the matrix unit and bulk copies, the same as TileLang's.

    TileLang adds up parities of bits where one exclusive or gives the place, which costs several instructions more.
    """
    rows, width = tile.shape
    if width % 64 > 0:
        return make_swizzled_layout(tile)
    return Layout((rows, width), lambda i, j: (j // 64 * rows + i) * 64 + ((j % 64 // 8) ^ (i % 8)) * 8 + j % 8)


def begin_batch(*touched: Any) -> None:
    """Begin a batch of products that read or write the registers `touched`. The caller commits the batch."""
    _fence(touched)
    T.evaluate(T.warpgroup_arrive())


def end_batch(running: int, *touched: Any) -> None:
    """Wait until at most the last `running` batches still run. The registers `touched` are then free again."""
    T.evaluate(T.warpgroup_wait(running))
    _fence(touched)


def _fence(touched: tuple[Any, ...]) -> None:
    for buffer in touched:
        T.warpgroup_fence_operand(buffer, num_regs=int(buffer.shape[0]) * buffer.dtype.bits // 32)


_STORE = Op.get("tl.ptx_stmatrix")


def row(tx: Any, lower: Any) -> Any:
    """Return the thread's row of an accumulator."""
    return tx % GROUP // 32 * 16 + lower * 8 + tx % 32 // 4


def column(tx: Any, block: Any, groups: int) -> Any:
    """Return the thread's first column in a block of 8."""
    return _block(tx, block, groups) * 8 + tx % 4 * 2


def _block(tx: Any, block: Any, groups: int) -> Any:
    return block if groups == 1 else block * groups + tx // GROUP


def store_matrices(target: Any, values: Any, first: Any, count: int, *, turned: bool) -> None:
    """stmatrix: lane t gives the address of row t % 8 of matrix t // 8, for `count` matrices from values[first] on."""
    # both numbers of a register as one word: packing them again would move them
    pairs = (T.call_extern("int32", "word", T.access_ptr(values[first + 2 * i], "r", extent=2)) for i in range(count))
    T.evaluate(
        T.call_intrin("handle", _STORE, T.bool(turned), count, T.access_ptr(target, "w", extent=8), *pairs, "m8n8")
    )


@T.macro
def put(tile, values, blocks, groups, tx, panel=0):
    """Write an accumulator rounded to bf16, `blocks` blocks per thread, into a shared tile.

    With `panel` the columns of a group are adjacent, and those of the next group start `panel` columns later.
    """
    for step in T.unroll(blocks // 2):
        block = step * 2 + tx // 16 % 2
        at = tx // GROUP * panel + block * 8 if panel > 0 else _block(tx, block, groups) * 8
        store_matrices(tile[tx % GROUP // 32 * 16 + tx % 16, at], values, step * 8, 4, turned=False)


def _turned(tile: Any, first: Any, step: Any, blocks: int, groups: int, tx: Any) -> Any:
    block = step * 2 + (tx // 16 % 2 if blocks > 1 else 0)
    return tile[first + _block(tx, block, groups) * 8 + tx % 8, tx % GROUP // 32 * 16 + tx // 8 % 2 * 8]


@T.macro
def put_turned(tile, first, values, blocks, groups, tx):
    """Write an accumulator [p,t] of `blocks` blocks per thread, as bf16, into tile[first + t, p]."""
    for step in T.unroll(max(1, blocks // 2)):
        store_matrices(
            _turned(tile, first, step, blocks, groups, tx), values, step * 8, min(4, blocks * 2), turned=True
        )


@T.macro
def take_turned(values, tile, first, blocks, groups, tx):
    """Read a tile that `put_turned` has written."""
    for step in T.unroll(max(1, blocks // 2)):
        T.ptx_ldmatrix(
            T.bool(True), min(4, blocks * 2),
            T.access_ptr(_turned(tile, first, step, blocks, groups, tx), "r", extent=8),
            T.access_ptr(values[step * 8], "w", extent=min(8, blocks * 4)),
        )  # fmt: skip


@T.macro
def scatter_sums(values, count, tx):
    """Add up `count` numbers over lanes 4, 8 and 16 apart. A lane keeps the sums from `kept(count, tx)` on."""
    for level in (16, 8, 4):
        left = count * level // 16
        if left > 1:
            other = (tx & level) > 0
            for c in T.unroll(left // 2):
                away = T.if_then_else(other, values[c], values[left // 2 + c])
                stays = T.if_then_else(other, values[left // 2 + c], values[c])
                values[c] = stays + T.shfl_xor(away, level)
        else:
            values[0] = values[0] + T.shfl_xor(values[0], level)


def kept(count: int, tx: Any) -> Any:
    """Return the index of the first of the max(1, count // 8) sums that a lane keeps."""
    first: Any = 0
    for level in (16, 8, 4):
        left = count * level // 16
        if left > 1:
            first = first + tx // level % 2 * (left // 2)
    return first
