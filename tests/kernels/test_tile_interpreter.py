"""The interpreter finds the faults that it says it finds, and gives right results otherwise."""

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang.language as T  # noqa: N812
from tvm.ir import Op

from kernels.mamba3_mimo.cuda.backward.head_sums import map_of
from tests.kernels.tile_interpreter import ProgramError, run

F32 = "float32"


def program(body, shape=(64,), threads=32):
    """Return a program of one block from `body`, a macro(x, y, tx) of two tensors and the thread."""

    @T.prim_func
    def one_block(x: T.Tensor(shape, F32), y: T.Tensor(shape, F32)):
        with T.Kernel(1, threads=threads) as _:
            tx = T.get_thread_binding()
            body(x, y, tx)

    return one_block


def result(body, shape=(64,), threads=32):
    x, y = torch.arange(float(torch.Size(shape).numel())).view(shape), torch.full(shape, float("nan"))
    run(program(body, shape, threads), x, y)
    return x, y


def test_threads_and_vectors_copy():
    @T.macro
    def body(x, y, tx):
        for e in T.vectorized(2):
            y[tx * 2 + e] = x[tx * 2 + e] + 1.0

    x, y = result(body)
    assert torch.equal(y, x + 1)


def test_branch_on_the_thread_masks():
    @T.macro
    def body(x, y, tx):
        if tx < 8:
            y[tx] = x[tx]
        else:
            y[tx] = 0.0

    x, y = result(body, (32,))
    assert torch.equal(y, torch.where(x < 8, x, 0))


def test_loop_length_may_differ_between_threads():
    @T.macro
    def body(x, y, tx):
        total = T.alloc_local((1,), F32)
        total[0] = 0.0
        for i in T.serial(tx):
            total[0] += x[i]
        y[tx] = total[0]

    x, y = result(body, (32,))
    assert torch.equal(y, x.cumsum(0) - x)


def test_view_shows_memory_in_another_order():
    @T.macro
    def body(x, y, tx):
        shared = T.alloc_shared((4, 8), F32)
        T.tma_copy(T.view(x, (8, 4), strides=(1, 8)), T.view(shared, (8, 4)))
        T.sync_threads()
        y[tx] = shared[tx // 8, tx % 8]

    x, y = result(body, (32,))
    assert torch.equal(y, x.view(4, 8).T.flatten())


def test_view_stays_within_its_memory():
    @T.macro
    def body(x, y, tx):
        y[tx] = T.view(x, (8, 4), strides=(2, 8))[tx // 4, tx % 4]

    with pytest.raises(ValueError, match="strides"):
        result(body, (32,))


def test_shuffle_exchanges_between_threads():
    @T.macro
    def body(x, y, tx):
        one = T.alloc_local((1,), F32)
        one[0] = x[tx]
        y[tx] = T.shfl_xor(one[0], 1)

    x, y = result(body, (32,))
    assert torch.equal(y.view(-1, 2), x.view(-1, 2).flip(1))


def test_matrix_product_and_row_sums():
    @T.macro
    def body(x, y, tx):
        a_s, b_s = T.alloc_shared((16, 16), F32), T.alloc_shared((16, 16), F32)
        c = T.alloc_fragment((16, 16), F32)
        T.copy(x, a_s)
        T.copy(x, b_s)
        T.gemm(a_s, b_s, c, transpose_B=True, clear_accum=True)
        T.copy(c, y)

    x, y = result(body, (16, 16))
    assert torch.equal(y, x @ x.T)


def test_place_written_with_two_values_is_found():
    @T.macro
    def body(x, y, tx):
        y[tx // 2] = x[tx]

    with pytest.raises(ProgramError, match="written twice"):
        result(body, (32,))


def test_index_out_of_bounds_is_found():
    @T.macro
    def body(x, y, tx):
        y[tx] = x[tx + 1]

    with pytest.raises(ProgramError, match="reads index 32 of 32"):
        result(body, (32,))


def staged(*, wait):
    @T.macro
    def body(x, y, tx):
        tile_s = T.alloc_shared((64,), F32)
        bar = T.alloc_barrier([32])
        T.tma_copy(x, tile_s, barrier=bar[0])
        T.mbarrier_arrive(bar[0])
        if wait:
            T.mbarrier_wait_parity(bar[0], 0)
        for e in T.vectorized(2):
            y[tx * 2 + e] = tile_s[tx * 2 + e]

    return body


def test_tile_is_there_after_the_wait_and_undefined_before():
    x, y = result(staged(wait=True))
    assert torch.equal(y, x)
    assert result(staged(wait=False))[1].isnan().all()


def test_wait_for_an_unfinished_phase_is_a_deadlock():
    @T.macro
    def body(x, y, tx):
        bar = T.alloc_barrier([64])
        T.mbarrier_arrive(bar[0])
        T.mbarrier_wait_parity(bar[0], 0)
        y[tx] = x[tx]

    with pytest.raises(ProgramError, match="deadlock"):
        result(body)


def ring(*, release):
    """One half of the threads fills a ring of one slot, the other half reads it."""

    @T.macro
    def body(x, y, tx):
        tile_s = T.alloc_shared((1, 8), F32)
        full, empty = T.alloc_barrier([32]), T.alloc_barrier([32])
        if tx < 32:
            for n in T.serial(4):
                T.mbarrier_wait_parity(full[0], n % 2)
                if tx < 8:
                    y[n, tx] = tile_s[0, tx]
                if release:
                    T.mbarrier_arrive(empty[0])
        else:
            for n in T.serial(4):
                T.mbarrier_wait_parity(empty[0], n % 2 ^ 1)
                T.tma_copy(x[n : n + 1, :], tile_s, barrier=full[0])
                T.mbarrier_arrive(full[0])

    return body


def test_roles_take_turns():
    x, y = result(ring(release=True), (4, 8), threads=64)
    assert torch.equal(y, x)


def test_role_that_is_never_released_is_a_deadlock():
    with pytest.raises(ProgramError, match="deadlock"):
        result(ring(release=False), (4, 8), threads=64)


def test_groups_of_copies_land_in_order():
    @T.macro
    def body(x, y, tx):
        tile_s = T.alloc_shared((2, 8), F32)
        for n in T.unroll(2):
            T.async_copy(x[n : n + 1, :], tile_s[n : n + 1, :])
        T.ptx_wait_group(1)
        if tx < 8:
            y[0, tx] = tile_s[0, tx]
            y[1, tx] = tile_s[1, tx]

    x, y = result(body, (2, 8))
    assert torch.equal(y[0], x[0])
    assert y[1].isnan().all()


def test_copy_of_more_axes_than_a_tensor_map_has_is_found():
    @T.macro
    def body(x, y, tx):
        tile_s = T.alloc_shared((1, 1, 1, 1, 2, 16), F32)
        bar = T.alloc_barrier([32])
        T.tma_copy(T.view(x, [1, 1, 1, 1, 2, 32])[:, :, :, :, :, :16], tile_s, barrier=bar[0])

    with pytest.raises(ProgramError, match="5 axes at most"):
        result(body)


def reduced(body_of):
    """Return what a bulk reduction leaves, added to a tensor [2,8,64] of ones: `body_of(tile, y, tx)` issues it."""

    @T.prim_func
    def one_block(y: T.Tensor((2, 8, 64), "bfloat16")):
        with T.Kernel(1, threads=128) as _:
            tx = T.get_thread_binding()
            tile_s = T.alloc_shared((8, 64), "bfloat16")
            for i, j in T.Parallel(8, 64):
                tile_s[i, j] = T.cast(i + j, "bfloat16")
            T.sync_threads()
            body_of(tile_s, y, tx)

    y = torch.ones(2, 8, 64, dtype=torch.bfloat16)
    run(one_block, y)
    return y


def added(tile_s, y, where):
    return T.evaluate(
        T.call_intrin(
            "handle", Op.get("tl.tma_store"), where, T.access_ptr(tile_s[0, 0], "r", extent=512), 0, 0, 1, 1, 0
        )
    )


def test_bulk_reduction_adds_one_box():
    @T.macro
    def body(tile_s, y, tx):
        if T.shuffle_elect(128):
            added(tile_s, y, map_of(y, (64, 8, 1)))

    y = reduced(body)
    assert (y[0] == 1).all()
    assert torch.equal(y[1], (torch.arange(8.0)[:, None] + torch.arange(64.0) + 1).bfloat16())


def test_bulk_reduction_issued_by_every_thread_is_found():
    @T.macro
    def body(tile_s, y, tx):
        added(tile_s, y, map_of(y, (64, 8, 1)))

    with pytest.raises(ProgramError, match="issued once"):
        reduced(body)
