"""Kernels of the recurrence with a matrix state per head, forward and backward, and their torch operators.

model/layers/recurrence.py has the equations, and the loop in torch's operations that these kernels replace. A block of
threads walks a row of tokens for one head in float32. A thread holds four numbers of the state, and the columns of W
that they need. The forward pass saves the state that enters each chunk of C tokens. The backward pass computes the
other states of a chunk from it, then walks the chunk backwards. All heads read one q and one k, so their gradients are
summed over heads afterwards. No sum depends on the order in which blocks run, so repeats agree in every bit.

Legend: B batch, S sequence, H heads, K key width, V value width, C tokens of a chunk.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any

import tilelang
import tilelang.language as T
import torch
from torch import Tensor

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.cuda.host import attest
from ablate.kernels.mamba3_mimo.cuda.host.compiled import TARGET
from ablate.kernels.mamba3_mimo.cuda.host.op import refusal_on
from ablate.kernels.mamba3_mimo.cuda.pieces.scalar import tanh
from ablate.kernels.scan_switches import ScanFact

F32 = "float32"
COLUMNS = 4
"""Adjacent numbers of a row of the state in one thread. The threads of a row are neighbours in a warp."""
PAD = 4
"""Numbers behind each row in shared memory, so that neighbouring threads read different banks."""
SHARED_BYTES = 150_000
"""For the states and candidates of a chunk, the largest of the buffers."""


def chunk_of(K: int, V: int) -> int:
    """Return C, a power of two. The shorter the chunks, the more states are saved."""
    return max(C for C in (1, 2, 4, 8, 16) if (2 * C + 1) * K * (V + PAD) * 4 <= SHARED_BYTES)


def make_products(V: int) -> tuple[Any, Any]:
    """Return the macros that load a thread's columns of a matrix, and multiply a row in shared memory by them."""

    @T.macro
    def columns_of(matrix, matrix_s, column):
        for m in T.unroll(V):
            for n in T.vectorized(COLUMNS):
                matrix[m * COLUMNS + n] = matrix_s[m, column + n]

    @T.macro
    def product(out, rows, i, row, matrix):
        of_row = T.alloc_local((4,), F32)
        for n in T.unroll(COLUMNS):
            out[n] = 0.0
        for m in T.unroll(V // 4):
            for e in T.vectorized(4):
                of_row[e] = rows[i, row, m * 4 + e]
            for e in T.unroll(4):
                for n in T.unroll(COLUMNS):
                    out[n] += of_row[e] * matrix[(m * 4 + e) * COLUMNS + n]

    return columns_of, product


def make_walk(K: int, V: int) -> Any:
    """Return macro(state [4], out [4], x_s, ...): the tokens of a chunk, forwards.

    `state` goes from the state before the chunk to that behind it. x_s [C+1,K,V] gets all of them, and z_s [C,K,V],
    unless `candidates` is False, the candidates.
    """
    C, (columns_of, product) = chunk_of(K, V), make_products(V)

    @T.macro
    def walk(state, out, x_s, z_s, k_s, v_s, f_s, keep_s, W_s, row, column, candidates):
        matrix = T.alloc_local((V * COLUMNS,), F32)
        for n in T.vectorized(COLUMNS):
            x_s[0, row, column + n] = state[n]
        columns_of(matrix, W_s, column)
        for i in T.serial(C):
            T.sync_threads()
            product(out, x_s, i, row, matrix)
            for n in T.unroll(COLUMNS):
                out[n] = tanh(keep_s[i] * out[n] + k_s[i, row] * v_s[i, column + n])
                state[n] = out[n] + f_s[i] * (keep_s[i] * state[n] - out[n])
            for n in T.vectorized(COLUMNS):
                x_s[i + 1, row, column + n] = state[n]
            if candidates:
                for n in T.vectorized(COLUMNS):
                    z_s[i, row, column + n] = out[n]
        T.sync_threads()

    return walk


def make_loads(K: int, V: int, S: Any) -> tuple[Any, Any, Any, Any]:
    """Return the macros that load a head's matrix, and by tokens of a chunk: keys, values of a head, numbers."""
    C, threads = chunk_of(K, V), K * V // COLUMNS

    @T.macro
    def matrix(W_s, weight, h, tx, turned):
        for j in T.serial(T.ceildiv(V * V, threads)):
            at = j * threads + tx
            if at < V * V:
                if turned:
                    W_s[at % V, at // V] = weight[h, at // V, at % V]
                else:
                    W_s[at // V, at % V] = weight[h, at // V, at % V]

    @T.macro
    def keys(x_s, x, b, t0, tx):
        for j in T.serial(T.ceildiv(C * K, threads)):
            at = j * threads + tx
            if at < C * K:
                x_s[at // K, at % K] = x[b, T.min(t0 + at // K, S - 1), at % K]

    @T.macro
    def values(x_s, x, b, t0, h, tx):  # 0 behind the row
        for j in T.serial(T.ceildiv(C * V, threads)):
            at = j * threads + tx
            if at < C * V:
                x_s[at // V, at % V] = T.if_then_else(
                    t0 + at // V < S, x[b, T.min(t0 + at // V, S - 1), h, at % V], 0.0
                )

    @T.macro
    def numbers(f_s, keep_s, f, keeps, b, t0, h, tx):
        if tx < C:
            f_s[tx] = f[b, T.min(t0 + tx, S - 1), h]
            keep_s[tx] = keeps[b, T.min(t0 + tx, S - 1)]

    return matrix, keys, values, numbers


def make_sums(K: int, V: int, S: Any) -> Any:
    """Return macro(out [B,S,H,V], weights [C,K], rows, first, ...): out = sums over the rows of places first + i."""
    C, threads = chunk_of(K, V), K * V // COLUMNS

    @T.macro
    def sums(out, weights, rows, first, b, t0, h, tx):
        total = T.alloc_local((1,), F32)
        for j in T.serial(T.ceildiv(C * V, threads)):
            i = (j * threads + tx) // V
            if i < C and t0 + i < S:
                total[0] = 0.0
                for eight in T.serial(K // 8):
                    for u in T.unroll(8):
                        row = eight * 8 + u
                        total[0] += weights[i, row] * rows[first + i, row, (j * threads + tx) % V]
                out[b, t0 + i, h, (j * threads + tx) % V] = total[0]

    return sums


def forward(K: int, V: int, saves: bool) -> Any:
    """Return the program: y [B,S,H,V] from q, k [B,S,K], v [B,S,H,V], f [B,S,H], weight [H,V,V] and keeps [B,S].

    keeps is 0 where a document starts, else 1. With `saves` also the states [B,H,ceil(S/C),K,V] that enter the chunks.
    """
    B, S, H, chunks = (T.dynamic(name) for name in ("batch", "length", "heads", "chunks"))
    C, lanes, walk, sums = chunk_of(K, V), V // COLUMNS, make_walk(K, V), make_sums(K, V, S)
    matrix, keys, values, numbers = make_loads(K, V, S)

    @T.prim_func
    def recurrence_forward(
        q: T.Tensor((B, S, K), F32),
        k: T.Tensor((B, S, K), F32),
        v: T.Tensor((B, S, H, V), F32),
        f: T.Tensor((B, S, H), F32),
        weight: T.Tensor((H, V, V), F32),
        keeps: T.Tensor((B, S), F32),
        y: T.Tensor((B, S, H, V), F32),
        entering: T.Tensor((B, H, chunks, K, V), F32),
    ):
        with T.Kernel(H, B, threads=K * lanes) as (h, b):
            W_s, x_s = T.alloc_shared((V, V), F32), T.alloc_shared((C + 1, K, V + PAD), F32)
            q_s, k_s = T.alloc_shared((C, K), F32), T.alloc_shared((C, K), F32)
            v_s, f_s, keep_s = T.alloc_shared((C, V), F32), T.alloc_shared((C,), F32), T.alloc_shared((C,), F32)
            state, out = T.alloc_local((COLUMNS,), F32), T.alloc_local((COLUMNS,), F32)
            tx = T.get_thread_binding()
            row, column = tx // lanes, tx % lanes * COLUMNS
            matrix(W_s, weight, h, tx, False)
            for n in T.unroll(COLUMNS):
                state[n] = 0.0
            for c in T.serial(T.ceildiv(S, C)):
                if saves:
                    for n in T.vectorized(COLUMNS):
                        entering[b, h, c, row, column + n] = state[n]
                T.sync_threads()
                keys(q_s, q, b, c * C, tx)
                keys(k_s, k, b, c * C, tx)
                values(v_s, v, b, c * C, h, tx)
                numbers(f_s, keep_s, f, keeps, b, c * C, h, tx)
                walk(state, out, x_s, x_s, k_s, v_s, f_s, keep_s, W_s, row, column, False)
                sums(y, q_s, x_s, 1, b, c * C, h, tx)

    return recurrence_forward


def backward(K: int, V: int) -> Any:
    """Return the program: gradients of the inputs of `forward` from dy and the saved states.

    dq and dk [B,S,H,K] are those of each head, dweight [B,H,V,V] that of each row.
    """
    B, S, H, chunks = (T.dynamic(name) for name in ("batch", "length", "heads", "chunks"))
    C, lanes, walk, sums = chunk_of(K, V), V // COLUMNS, make_walk(K, V), make_sums(K, V, S)
    columns_of, product = make_products(V)
    matrix, keys, values, numbers = make_loads(K, V, S)
    warps = K * lanes // 32

    @T.prim_func
    def recurrence_backward(
        q: T.Tensor((B, S, K), F32),
        k: T.Tensor((B, S, K), F32),
        v: T.Tensor((B, S, H, V), F32),
        f: T.Tensor((B, S, H), F32),
        weight: T.Tensor((H, V, V), F32),
        keeps: T.Tensor((B, S), F32),
        entering: T.Tensor((B, H, chunks, K, V), F32),
        dy: T.Tensor((B, S, H, V), F32),
        dq: T.Tensor((B, S, H, K), F32),
        dk: T.Tensor((B, S, H, K), F32),
        dv: T.Tensor((B, S, H, V), F32),
        df: T.Tensor((B, S, H), F32),
        dweight: T.Tensor((B, H, V, V), F32),
    ):
        with T.Kernel(H, B, threads=K * lanes) as (h, b):
            W_s, turned_s = T.alloc_shared((V, V), F32), T.alloc_shared((V, V), F32)
            x_s, z_s = T.alloc_shared((C + 1, K, V + PAD), F32), T.alloc_shared((C, K, V + PAD), F32)
            q_s, k_s, df_s = T.alloc_shared((C, K), F32), T.alloc_shared((C, K), F32), T.alloc_shared((C, warps), F32)
            v_s, dy_s = T.alloc_shared((C, V), F32), T.alloc_shared((C, V), F32)
            f_s, keep_s = T.alloc_shared((C,), F32), T.alloc_shared((C,), F32)
            state, d_state, out = (T.alloc_local((COLUMNS,), F32) for _ in range(3))
            d_candidate, of_row = T.alloc_local((COLUMNS,), F32), T.alloc_local((4,), F32)
            turned, d_matrix = T.alloc_local((V * COLUMNS,), F32), T.alloc_local((V * COLUMNS,), F32)
            total, z = T.alloc_local((3,), F32), T.alloc_local((1,), F32)
            tx = T.get_thread_binding()
            row, column = tx // lanes, tx % lanes * COLUMNS
            matrix(W_s, weight, h, tx, False)
            matrix(turned_s, weight, h, tx, True)
            for n in T.unroll(COLUMNS):
                d_state[n] = 0.0
            for n in T.unroll(V * COLUMNS):
                d_matrix[n] = 0.0
            for back in T.serial(chunks):
                c = chunks - 1 - back
                for n in T.vectorized(COLUMNS):
                    state[n] = entering[b, h, c, row, column + n]
                T.sync_threads()
                keys(q_s, q, b, c * C, tx)
                keys(k_s, k, b, c * C, tx)
                values(v_s, v, b, c * C, h, tx)
                values(dy_s, dy, b, c * C, h, tx)
                numbers(f_s, keep_s, f, keeps, b, c * C, h, tx)
                walk(state, out, x_s, z_s, k_s, v_s, f_s, keep_s, W_s, row, column, True)
                columns_of(turned, turned_s, column)
                for before in T.serial(C):
                    i = C - 1 - before
                    for e in T.unroll(3):
                        total[e] = 0.0
                    for n in T.unroll(COLUMNS):
                        z[0] = z_s[i, row, column + n]
                        d_state[n] += q_s[i, row] * dy_s[i, column + n]
                        total[0] += x_s[i + 1, row, column + n] * dy_s[i, column + n]
                        total[1] += d_state[n] * (keep_s[i] * x_s[i, row, column + n] - z[0])
                        d_candidate[n] = (1.0 - f_s[i]) * d_state[n] * (1.0 - z[0] * z[0])
                        total[2] += d_candidate[n] * v_s[i, column + n]
                    for n in T.vectorized(COLUMNS):
                        z_s[i, row, column + n] = d_candidate[n]
                    for m in T.unroll(V // 4):
                        for e in T.vectorized(4):
                            of_row[e] = x_s[i, row, m * 4 + e]
                        for e in T.unroll(4):
                            for n in T.unroll(COLUMNS):
                                d_matrix[(m * 4 + e) * COLUMNS + n] += of_row[e] * (keep_s[i] * d_candidate[n])
                    for far in T.unroll(5):
                        if far < lanes.bit_length() - 1:
                            total[0] += T.shfl_xor(total[0], 1 << far)
                            total[2] += T.shfl_xor(total[2], 1 << far)
                        total[1] += T.shfl_xor(total[1], 1 << far)
                    if tx % 32 == 0:
                        df_s[i, tx // 32] = total[1]
                    if column == 0 and c * C + i < S:
                        dq[b, c * C + i, h, row] = total[0]
                        dk[b, c * C + i, h, row] = total[2]
                    T.sync_threads()
                    product(out, z_s, i, row, turned)
                    for n in T.unroll(COLUMNS):
                        d_state[n] = keep_s[i] * (f_s[i] * d_state[n] + out[n])
                sums(dv, k_s, z_s, 0, b, c * C, h, tx)
                if tx < C and c * C + tx < S:
                    total[0] = 0.0
                    for warp in T.unroll(warps):
                        total[0] += df_s[tx, warp]
                    df[b, c * C + tx, h] = total[0]
            for m in T.unroll(V):
                T.sync_threads()
                for n in T.vectorized(COLUMNS):
                    x_s[0, row, column + n] = d_matrix[m * COLUMNS + n]
                T.sync_threads()
                if tx < V:
                    total[0] = 0.0
                    for at in T.serial(K):
                        total[0] += x_s[0, at, tx]
                    dweight[b, h, m, tx] = total[0]

    return recurrence_backward


_building = Lock()


@lru_cache(maxsize=32)
def compiled(name: str, *sizes: int | bool) -> Any:
    """Return the compiled kernel `forward` (K, V, saves) or `backward` (K, V), for every batch, length and heads."""
    with _building:  # TileLang's builder is Python, so programs are built one at a time
        program = PROGRAMS[name](*sizes)
    kernel = tilelang.compile(program, target=TARGET, execution_backend="tvm_ffi", pass_configs=OPTIONS)
    facts.add(ScanFact.KERNELS_COMPILED if kernel.artifact is not None else ScanFact.KERNELS_LOADED, 1)
    return kernel


PROGRAMS: dict[str, Callable[..., Any]] = {"forward": forward, "backward": backward}
OPTIONS = {
    tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
    tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True,
}
"""Options of the compiler. The exact division would be a branch for each number."""


@lru_cache(maxsize=32)
def _attested(name: str, *sizes: int | bool) -> dict[str, facts.Fact]:
    (row,) = attest.table({f"recurrence_{name}": compiled(name, *sizes)})
    return row


def _launch(name: str, sizes: tuple[int | bool, ...], *tensors: Tensor) -> None:
    device = tensors[0].device
    reason = refusal_on(device) if device.type == "cuda" else f"its kernels need an NVIDIA GPU; the device is {device}"
    if reason is not None:
        raise KernelUnsupported(f"recurrence: {reason}")
    with torch.cuda.device_of(tensors[0]):  # a kernel leaves its own device as current
        compiled(name, *sizes).adapter.get_exportable_executable()["main"](*tensors)
    facts.record(facts.RECURRENCE, "fused")
    if facts.collecting():
        facts.describe(f"recurrence_{name}", _attested(name, *sizes))


def recurrence(
    q_BSK: Tensor, k_BSK: Tensor, v_BSHV: Tensor, f_BSH: Tensor, weight_HVV: Tensor, starts_BS: Tensor
) -> Tensor:
    """Return the outputs [B,S,H,V], float32 like all tensors but the starts. Under torch.compile it is one operator.

    Raises:
        KernelUnsupported: the tensors are not on a GPU that the kernels are compiled for.

    """
    tensors = [tensor.contiguous() for tensor in (q_BSK, k_BSK, v_BSHV, f_BSH, weight_HVV)]
    saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    out_BSHV: Tensor = _forward(*tensors, (~starts_BS).float(), saves)[0]
    return out_BSHV


@torch.library.custom_op("ablate::recurrence", mutates_args=())
def _forward(
    q_BSK: Tensor, k_BSK: Tensor, v_BSHV: Tensor, f_BSH: Tensor, weight_HVV: Tensor, keeps_BS: Tensor, saves: bool
) -> tuple[Tensor, Tensor]:
    out, entering = _forward_shapes(q_BSK, k_BSK, v_BSHV, f_BSH, weight_HVV, keeps_BS, saves)
    sizes = q_BSK.shape[2], v_BSHV.shape[3], saves
    _launch("forward", sizes, q_BSK, k_BSK, v_BSHV, f_BSH, weight_HVV, keeps_BS, out, entering)
    return out, entering


@_forward.register_fake
def _forward_shapes(
    q_BSK: Tensor, _k: Tensor, v_BSHV: Tensor, _f: Tensor, _weight: Tensor, _keeps: Tensor, saves: bool
) -> tuple[Tensor, Tensor]:
    batch, length, heads, width = v_BSHV.shape
    key = q_BSK.shape[2]
    chunks = -(-length // chunk_of(key, width)) if saves else 1
    return torch.empty_like(v_BSHV), v_BSHV.new_empty(batch, heads, chunks, key, width)


@torch.library.custom_op("ablate::recurrence_backward", mutates_args=())
def _backward(
    q_BSK: Tensor,
    k_BSK: Tensor,
    v_BSHV: Tensor,
    f_BSH: Tensor,
    weight_HVV: Tensor,
    keeps_BS: Tensor,
    entering: Tensor,
    dy_BSHV: Tensor,
) -> list[Tensor]:
    tensors = q_BSK, k_BSK, v_BSHV, f_BSH, weight_HVV, keeps_BS, entering, dy_BSHV
    grads = _of_heads(*tensors)
    _launch("backward", (q_BSK.shape[2], v_BSHV.shape[3]), *tensors, *grads)
    dq, dk, dv, df, dweight = grads
    return [dq.sum(2), dk.sum(2), dv, df, dweight.sum(0)]


def _of_heads(q: Tensor, _k: Tensor, v: Tensor, f: Tensor, weight: Tensor, *_: Tensor) -> list[Tensor]:
    per_head = (*f.shape, q.shape[2])
    by_key = (v.new_empty(per_head) for _ in range(2))
    return [*by_key, torch.empty_like(v), torch.empty_like(f), v.new_empty(v.shape[0], *weight.shape)]


@_backward.register_fake
def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, f: Tensor, weight: Tensor, *_: Tensor) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (q, k, v, f, weight)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])


def _differentiate(ctx: Any, dy_BSHV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(*ctx.saved_tensors, dy_BSHV.contiguous()), None, None)


_forward.register_autograd(_differentiate, setup_context=_save)
