"""Chained matrix products of small matrices in one launch, written in CuTe DSL for Hopper (sm_90a).

A block of threads computes 64 or 128 rows of one batch item. TMA loads its rows of A and the right operands, of which
two are in shared memory at a time. WGMMA multiplies. The accumulator of a product, rounded to bfloat16 in registers, is
the left operand of the next one, so no intermediate result reaches shared or global memory.
"""

from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers
from torch import Tensor

from tests.kernels.bench.chain import ALIGNMENT

BUFFERS = 2
"""Right operands in shared memory at a time."""
WARPGROUP = 128
"""Threads of a warpgroup, which computes 64 rows."""


class Chain:
    """Y = A @ B for one right operand, ((A @ B) @ C) @ D for three. One object is one compiled kernel.

    A and Y: bfloat16 (batch, rows, width). Right operands: bfloat16 (batch, width, width). The batch is open.
    """

    def __init__(self, rows: int, width: int, products: int) -> None:
        self.width, self.products = width, products
        self.tile_rows = 128 if rows % 128 == 0 else 64
        self.threads = WARPGROUP * self.tile_rows // 64
        self.buffers = min(BUFFERS, products)

    @cute.jit
    def __call__(self, A: cute.Tensor, rights: tuple, Y: cute.Tensor, stream):
        """Launch a block for every tile of rows of every batch item."""
        left, right = self._left_layout(), cute.select(self._right_layout(), mode=[0, 1])
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tile = (self.tile_rows, self.width)
        square = (self.width, self.width)
        load_A = cpasync.make_tiled_tma_atom(load, _modes(A, [1, 2, 0]), left, tile)
        save_Y = cpasync.make_tiled_tma_atom(save, _modes(Y, [1, 2, 0]), left, tile)
        load_rights = tuple(
            cpasync.make_tiled_tma_atom(load, _modes(right_operand, [2, 1, 0]), right, square)
            for right_operand in rights
        )
        self._kernel(load_A, load_rights, save_Y).launch(
            grid=(A.shape[0], A.shape[1] // self.tile_rows, 1), block=(self.threads, 1, 1), stream=stream
        )

    def _left_layout(self) -> Any:
        """Return the swizzled shared-memory layout of a tile of A or Y, (tile_rows, width)."""
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, cutlass.BFloat16, self.width)
        atom = warpgroup.make_smem_layout_atom(kind, cutlass.BFloat16)
        return cute.tile_to_shape(atom, (self.tile_rows, self.width), order=(0, 1))

    def _right_layout(self) -> Any:
        """Return the layout of the right operands, (column, row, buffer). Columns are contiguous in global memory."""
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.COL_MAJOR, cutlass.BFloat16, self.width)
        atom = warpgroup.make_smem_layout_atom(kind, cutlass.BFloat16)
        return cute.tile_to_shape(atom, (self.width, self.width, self.buffers), order=(1, 0, 2))

    def _mma(self, source: Any) -> Any:
        """Return the WGMMA with the left operand from `source`, shared memory or registers."""
        return hopper_helpers.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, OperandMajorMode.K, OperandMajorMode.MN, cutlass.Float32,
            atom_layout_mnk=(self.tile_rows // 64, 1, 1), tiler_mn=(64, self.width), a_source=source,
        )  # fmt: skip

    def _storage(self) -> Any:
        """Return the type of the shared memory."""
        elements = self.tile_rows * self.width
        right_elements = self.width * self.width * self.buffers

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, self.products]
            left: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, elements], 1024]
            right: cute.struct.Align[cute.struct.MemRange[cutlass.BFloat16, right_elements], 1024]

        return Storage

    @cute.kernel
    def _kernel(self, load_A, load_rights, save_Y):
        item, row_tile, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self._storage())
        left, right = self._left_layout(), self._right_layout()
        sA = storage.left.get_tensor(left.outer, swizzle=left.inner)
        sB = storage.right.get_tensor(right.outer, swizzle=right.inner)
        barriers = storage.barriers.data_ptr()
        if warp_index == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.products):
                    cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp_index == 0:
            self._expect(barriers, 2 * self.width * (self.width + self.tile_rows))
            self._load(load_A, sA, (row_tile, 0, item), barriers)
            self._load(load_rights[0], sB[None, None, 0], (0, 0, item), barriers)
            for i in cutlass.range_constexpr(1, self.buffers):
                self._load_right(load_rights[i], sB, i, item, barriers)
        first = self._mma(warpgroup.OperandSource.SMEM)
        later = self._mma(warpgroup.OperandSource.RMEM)
        sums = cute.make_rmem_tensor(first.partition_shape_C((self.tile_rows, self.width)), cutlass.Float32)
        rounded = cute.make_rmem_tensor(sums.layout, cutlass.BFloat16)
        part_A, part_B = first.get_slice(thread), later.get_slice(thread)
        tA = first.make_fragment_A(part_A.partition_A(sA))
        tB = later.make_fragment_B(part_B.partition_B(sB))
        chained = later.make_fragment_A(later.partition_shape_A((self.tile_rows, self.width)))
        for i in cutlass.range_constexpr(self.products):
            cute.arch.mbarrier_wait(barriers + i, 0)
            buffer = tB[None, None, None, i % BUFFERS]
            if cutlass.const_expr(i == 0):
                self._multiply(first, sums, tA, buffer)
            else:
                self._multiply(later, sums, chained, buffer)
            if cutlass.const_expr(i + BUFFERS < self.products):
                cute.arch.sync_threads()  # all warpgroups have read this buffer
                if warp_index == 0:
                    self._load_right(load_rights[i + BUFFERS], sB, i + BUFFERS, item, barriers)
            rounded.store(sums.load().to(cutlass.BFloat16))
            # accumulators and left operands have the same order in registers: 8 values for 16 columns
            cute.make_tensor(chained.iterator, sums.layout).store(rounded.load())
        self._save(save_Y, first, rounded, sA, (row_tile, 0, item))

    @cute.jit
    def _expect(self, barrier, size: cutlass.Constexpr):
        """Let a barrier wait for this many bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    @cute.jit
    def _load(self, load, target, coordinates, barrier):
        """Load the tile at these coordinates, (tile of mode 0, tile of mode 1, batch item)."""
        tile = cute.local_tile(load.tma_tensor, cute.product_each(target.shape), coordinates)
        shared, tiles = cpasync.tma_partition(
            load.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(load.atom, tiles, shared, tma_bar_ptr=barrier)

    @cute.jit
    def _load_right(self, load, sB, i: cutlass.Constexpr, item, barriers):
        """Load the right operand of product `i` into its buffer."""
        self._expect(barriers + i, 2 * self.width * self.width)
        self._load(load, sB[None, None, i % BUFFERS], (0, 0, item), barriers + i)

    @cute.jit
    def _multiply(self, mma, sums, left, right):
        """Set sums = left @ right and wait for the result."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.width // 16):
            cute.gemm(atom, sums, left[None, None, k], right[None, None, k], sums)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def _save(self, save, mma, rounded, sY, coordinates):
        """Write the tile of Y through shared memory. A warpgroup writes only rows whose part of A it has read."""
        thread, _, _ = cute.arch.thread_idx()
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass.BFloat16)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(sY))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            tile = cute.local_tile(save.tma_tensor, cute.product_each(sY.shape), coordinates)
            shared, tiles = cpasync.tma_partition(
                save.atom, 0, cute.make_layout(1), cute.group_modes(sY, 0, 2), cute.group_modes(tile, 0, 2)
            )
            cute.copy(save.atom, shared, tiles)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def _modes(tensor: Any, order: list[int]) -> Any:
    """Return a view of the tensor with its modes in this order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))


@cache
def compiled(rows: int, width: int, products: int) -> Any:
    """Return the kernel for these sizes as a function of (A, right operands, Y), torch tensors on the GPU.

    It runs on torch's current stream.
    """
    batch = cute.sym_int()

    def operand(size: int) -> Any:
        return make_fake_compact_tensor(
            cutlass.BFloat16, (batch, size, width), stride_order=(2, 1, 0), assumed_align=ALIGNMENT
        )

    rights = tuple(operand(width) for _ in range(products))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    chain = Chain(rows, width, products)
    return cute.compile(chain, operand(rows), rights, operand(rows), stream, options="--enable-tvm-ffi")


def chained(left: Tensor, rights: tuple[Tensor, ...]) -> Tensor:
    """Return the product of `left` and the right operands in one launch. Sizes: see Chain."""
    result = torch.empty_like(left)
    compiled(left.shape[1], left.shape[2], len(rights))(left, rights, result)
    return result
