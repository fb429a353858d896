"""Register-level pieces of the backward walk with two warp groups: matrix products, rotation, sums over rows.

A matrix [64, 64 * k] of one warp group is spread as its matrix instructions want it: with lane l of warp w, element
i = 4 * jb + 2 * rh + e of a thread is row 16 * w + l // 4 + 8 * rh, column 8 * jb + 2 * (l % 4) + e. Rows are in time
order, row = c * R + r, so that the rows of one thread have one rank (l // 4 % R) and every time belongs to one warp.
"""

# TileLang programs: tensors are positional, `T` is the language's own name, macros take tensors without annotations.
# ruff: noqa: C901, N812, PLR0913, PLR0917

from typing import Any, NamedTuple

import tilelang.language as T

from kernels.mamba3_mimo.cuda.host.machine import GROUP
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.pieces import scalar
from kernels.mamba3_mimo.cuda.pieces.scalar import RotaryPair
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32

TILE = 8192
"""Bytes of a tile of 64 rows and 64 columns, bf16."""

Q_READY, K_READY, G_READY, K_FREE, G_FREE, HANDS = 0, 2, 4, 5, 7, 8
"""First of the barriers between the roles, and their number. A waiter tests the parity of a phase, so a barrier must
not run two phases ahead of it: those of q, of k and x, and of their release have one barrier for each slot.
"""

DEVICE_SOURCE = """
#include <tl_templates/cuda/instruction/wgmma.h>
namespace walk {
// address of shared memory as instructions take it
TL_DEVICE int shared(const void *tiles) { return int(__cvta_generic_to_shared(tiles)); }
// 16 x 16 elements of a swizzled tile, in the layout of a matrix instruction's operand
TL_DEVICE void load_rows(int at, void *regs) {
  auto w = reinterpret_cast<uint32_t *>(regs);
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(at) : "memory");
}
TL_DEVICE void store_rows(int at, const void *regs) {
  auto w = reinterpret_cast<const uint32_t *>(regs);
  asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(at), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
// one step of a matrix product [64, 16] x [16, 64]; a tile is at byte `at`, rows of 128 bytes, swizzled
TL_DEVICE uint64_t tile_at(int at) { return uint64_t(0x40000040u) << 32 | uint32_t(at >> 4 | 1 << 16); }
template <bool COLUMNS> TL_DEVICE void product_rs(float *acc, const void *a, int b_at, int add) {
  tl::wgmma_rs<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, 64, 16, false, !COLUMNS,
               1, 1>(reinterpret_cast<const uint32_t *>(a), tile_at(b_at), reinterpret_cast<uint32_t *>(acc), add);
}
template <bool A_COLUMNS, bool COLUMNS> TL_DEVICE void product_ss(float *acc, int a_at, int b_at, int add) {
  tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, 64, 16, !A_COLUMNS,
               !COLUMNS, 1, 1>(tile_at(a_at), tile_at(b_at), reinterpret_cast<uint32_t *>(acc), add);
}
// the elements of accumulators [64, 64] whose row and column belong to one time, if the column does
TL_DEVICE void same_time(const float *acc, int warp, float *own) {
#pragma unroll
  for (int rh = 0; rh < 2; ++rh)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float low = warp & 1 ? acc[4 * (2 + rh) + 2 * rh + e] : acc[4 * rh + 2 * rh + e];
      float high = warp & 1 ? acc[4 * (6 + rh) + 2 * rh + e] : acc[4 * (4 + rh) + 2 * rh + e];
      own[2 * rh + e] = warp & 2 ? high : low;
      asm volatile("" : "+f"(own[2 * rh + e]) :: "memory"); // chosen here, before the registers are used again
    }
}
// sums over the lanes of one rank's row and its partners: every step keeps half of the values
TL_DEVICE uint32_t both(uint32_t a, uint32_t b) {
  asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}
TL_DEVICE float both(float a, float b) { return a + b; }
template <int BIT, int END, int HALF, typename V> TL_DEVICE void halved(V *v) {
  if constexpr (BIT < END) {
    bool up = threadIdx.x & BIT;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      V keep = up ? v[i + HALF] : v[i], send = up ? v[i] : v[i + HALF];
      v[i] = both(keep, __shfl_xor_sync(0xffffffffu, send, BIT));
    }
    if constexpr (HALF == 0) v[0] = both(v[0], __shfl_xor_sync(0xffffffffu, v[0], BIT));
    halved<2 * BIT, END, HALF / 2>(v);
  }
}
// sums of bf16 pairs over the ranks: 4 words -> 4 / R words, at least one
template <int R> TL_DEVICE void rank_sum_pairs(void *regs) { halved<4, 4 * R, 2>(reinterpret_cast<uint32_t *>(regs)); }
// sums over the ranks: N values -> N / R values
template <int R, int N> TL_DEVICE void rank_sum(float *v) { halved<4, 4 * R, N / 2>(v); }
// sums over the rows of one time and their lanes; v[0 .. N) of row half 0, v[N .. 2 N) of 1; lane bit 0 picks the half
template <int R, int N> TL_DEVICE void time_sum(float *v) {
  bool up = threadIdx.x & 1;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float keep = up ? v[i + N] : v[i], send = up ? v[i] : v[i + N];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, send, 1);
  }
#pragma unroll
  for (int bit = 2; bit < 4 * R; bit *= 2)
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], bit);
}
} // namespace walk
"""
"""What TileLang has no operation for: matrix loads and stores at computed addresses, sums over a warp's rows."""


def wide(kk: int) -> int:
    """Return the byte offset of the 16 columns kk of a tile [64, 64 * k] whose panels follow each other."""
    return kk // 4 * TILE + kk % 4 * 32


def deep(kk: int) -> int:
    """Return the byte offset of the 16 rows kk of a tile."""
    return kk * 2048


@T.macro
def product_rs(acc, acc_at, a, b_at, steps, b_by_columns, clear):
    """Add a [64, 16 * steps] in registers times a tile at byte b_at to acc; b_by_columns: the tile is transposed."""
    for kk in tuple(range(steps)):
        T.call_extern(
            "handle", f"walk::product_rs<{int(b_by_columns)}>", T.access_ptr(acc[acc_at], "rw"),
            T.access_ptr(a[8 * kk], "r"), b_at + (wide(kk) if b_by_columns else deep(kk)),
            0 if clear and kk == 0 else 1,
        )  # fmt: skip


@T.macro
def product_ss(acc, acc_at, a_at, a_by_columns, b_at, steps, b_by_columns, clear):
    """Do as `product_rs` with a in a tile at byte a_at; not a_by_columns: the tile is transposed."""
    for kk in tuple(range(steps)):
        T.call_extern(
            "handle", f"walk::product_ss<{int(a_by_columns)}, {int(b_by_columns)}>", T.access_ptr(acc[acc_at], "rw"),
            a_at + (wide(kk) if a_by_columns else deep(kk)), b_at + (wide(kk) if b_by_columns else deep(kk)),
            0 if clear and kk == 0 else 1,
        )  # fmt: skip


@T.macro
def load_tile(at, lane_at, regs, steps):
    """Load the thread's elements of the 16 columns of each of `steps`, of a tile at byte `at`, into bf16 registers."""
    for kk in steps:
        T.call_extern(
            "handle", "walk::load_rows", at + wide(kk - kk % 4) + (lane_at ^ (kk % 4 * 32)),
            T.access_ptr(regs[8 * kk], "w"),
        )  # fmt: skip


@T.macro
def load_part(at, lane_at, regs, kk):
    """Load the thread's elements of the 16 columns kk < 4 of a tile at byte `at` into 8 bf16 registers."""
    T.call_extern("handle", "walk::load_rows", at + (lane_at ^ (kk * 32)), T.access_ptr(regs[0], "w"))


@T.macro
def store_tile(at, lane_at, regs, steps):
    """Store bf16 registers as the 16 columns of each of `steps` of a tile at byte `at`."""
    for kk in steps:
        T.call_extern(
            "handle", "walk::store_rows", at + wide(kk - kk % 4) + (lane_at ^ (kk % 4 * 32)),
            T.access_ptr(regs[8 * kk], "r"),
        )  # fmt: skip


@T.macro
def rounded(out, acc, count):
    """Round `count` accumulators to bf16."""
    for i in T.unroll(count // 4):
        for e in T.vectorized(4):
            out[i * 4 + e] = bf16(acc[i * 4 + e])


@T.macro
def arrive(bars, which, tx):
    """Arrive once per warp, after all its lanes."""
    T.sync_warp()
    if tx % 32 == 0:
        T.mbarrier_arrive(bars[which])


def make_rotation(s: ScanShape) -> tuple[Any, Any]:
    """Return macros rotated(x, cos, sin), unrotated(x, grad, tile, turn, cos, sin) on a thread's registers.

    x bf16 [N/2] is rotated in place, or receives the unrotated grad fp32; tile is the rotated tile, whose gradient
    grad is; turn fp32 [A/2] receives the gradient of the angles.
    """
    A, pair = s.A, s.N // 4

    @T.macro
    def rotated(x, cos, sin):
        for i in T.unroll(A // 4):
            lo, hi = T.alloc_local((2,), F32), T.alloc_local((2,), F32)
            for e in T.unroll(2):
                lo[e] = f32(x[i * 2 + e])
                hi[e] = f32(x[pair + i * 2 + e])
            for e in T.vectorized(2):
                x[i * 2 + e] = bf16(scalar.turned(lo[e], hi[e], f32(cos[i * 2 + e]), f32(sin[i * 2 + e])).lo)
            for e in T.vectorized(2):
                x[pair + i * 2 + e] = bf16(scalar.turned(lo[e], hi[e], f32(cos[i * 2 + e]), f32(sin[i * 2 + e])).hi)

    @T.macro
    def unrotated(x, grad, tile, turn, cos, sin):
        for i in T.unroll(A // 2):
            turn[i] = scalar.moment(RotaryPair(grad[i], grad[pair + i]), RotaryPair(f32(tile[i]), f32(tile[pair + i])))
        for i in T.unroll(A // 4):
            for e in T.vectorized(2):
                x[i * 2 + e] = bf16(
                    scalar.turned_back(
                        grad[i * 2 + e], grad[pair + i * 2 + e], f32(cos[i * 2 + e]), f32(sin[i * 2 + e])
                    ).lo
                )
            for e in T.vectorized(2):
                x[pair + i * 2 + e] = bf16(
                    scalar.turned_back(
                        grad[i * 2 + e], grad[pair + i * 2 + e], f32(cos[i * 2 + e]), f32(sin[i * 2 + e])
                    ).hi
                )
        for i in T.unroll((pair - A // 2) // 2):
            for e in T.vectorized(2):
                x[A // 2 + i * 2 + e] = bf16(grad[A // 2 + i * 2 + e])
            for e in T.vectorized(2):
                x[pair + A // 2 + i * 2 + e] = bf16(grad[pair + A // 2 + i * 2 + e])

    return rotated, unrotated


class Parts(NamedTuple):
    """Macros that both roles use."""

    angles: Any
    """macro(cos, sin, cs_s, third, c0, q2): the thread's angles of the chunk in slot `third`."""
    biased: Any
    """macro(x, bias_s, which, rank, quad): add the bias."""
    weighted: Any
    """macro(out, acc, table, slot, c0, q2, w, skip, with_skip): weights, and D on the diagonal; rounded to bf16."""
    column: Any
    """macro(out, tab_s, which, rank, quad, i): the four values of a [R,P] tensor that belong to columns 16 i."""
    flushed: Any
    """macro(acc, red, out, b, h, w, g8, quad, group): sum the accumulators of the warps, write them."""


def make_parts(s: ScanShape) -> Parts:
    """Return the macros that both roles use."""
    N, R, A, C = s.N, s.R, s.A, s.C
    parts, own_e = 8 // R, 2 if R == 1 else 1

    @T.macro
    def angles(cos, sin, cs_s, third, c0, q2):
        for jb in T.unroll(A // 8):
            for rh in T.unroll(2):
                for e in T.vectorized(2):
                    cos[jb * 4 + rh * 2 + e] = cs_s[third * (A // 4) + 2 * jb, c0 + rh * parts, q2 + e]
                for e in T.vectorized(2):
                    sin[jb * 4 + rh * 2 + e] = cs_s[third * (A // 4) + 2 * jb + 1, c0 + rh * parts, q2 + e]

    @T.macro
    def biased(x, bias_s, which, rank, quad):
        held = T.alloc_local((N // 4,), BF16)
        for i in T.unroll(N // 32):
            for e in T.vectorized(8):
                held[i * 8 + e] = bias_s[which, rank, quad * (N // 4) + i * 8 + e]
        for jb in T.unroll(N // 8):
            for rh in T.unroll(2):
                for e in T.vectorized(2):
                    x[jb * 4 + rh * 2 + e] = x[jb * 4 + rh * 2 + e] + held[jb * 2 + e]

    @T.macro
    def weighted(out, acc, table, slot, c0, q2, w, skip, with_skip):
        for rh in T.unroll(2):
            for i in T.unroll(2):
                near = T.alloc_local((4 * own_e,), F32)
                for own in T.unroll(own_e):
                    for e in T.vectorized(4):
                        near[own * 4 + e] = table[
                            slot * C * C + (c0 + rh * parts) * C + (q2 + own) // R * 8 + i * 4 + e
                        ]
                for j in T.unroll(4):
                    both = T.alloc_local((2,), F32)
                    for e in T.unroll(2):
                        both[e] = acc[(i * 4 + j) * 4 + rh * 2 + e] * near[e % own_e * 4 + j]
                        if with_skip:
                            both[e] = both[e] + scalar.skipped(2 * w + rh == i * 4 + j, skip[e])
                    for e in T.vectorized(2):
                        out[(i * 4 + j) * 4 + rh * 2 + e] = bf16(both[e])

    @T.macro
    def column(out, tab_s, which, rank, quad, i):
        for e in T.vectorized(4):
            out[e] = tab_s[which, rank, quad * 20 + i * 4 + e]

    @T.macro
    def flushed(acc, red, out, b, h, w, g8, quad, group):
        # the warps add in turn, so that the order is fixed
        for turn in tuple(range(4)):
            T.sync_threads(group, GROUP)
            if w == turn:
                for i in T.unroll(8):
                    for e in T.unroll(2):
                        at = (g8 % R * parts + g8 // R) * 64 + i * 8 + quad * 2 + e
                        if turn == 0:
                            red[at] = acc[i * 2 + e]
                        elif turn < 3:
                            red[at] = red[at] + acc[i * 2 + e]
                        else:
                            out[b, h, g8 % R * parts + g8 // R, i * 8 + quad * 2 + e] = red[at] + acc[i * 2 + e]

    return Parts(angles, biased, weighted, column, flushed)
