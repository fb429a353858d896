"""Lifted form of F3: q, the state, the scores and the results in registers, in the layout of the matrix unit.

Warp w works on 16 / R tokens of a chunk with all their ranks, so the sum over ranks needs no shared memory. Row i of
its 16 rows is rank i % 8 // T + (8 // T) * (i // 8) of token T * w + i % T, with T = 16 / R (one rank: token
16 * w + i). A lane holds rows `lane // 4` and `lane // 4` + 8, and columns 2 * (lane % 4) and the next of every group
of 8. Columns of k~ are reordered in shared memory: 16 * g + i is state 8 * g + i % 8 of the half i // 8. So a lane
holds the pairs that are rotated together. Letters: see shape.py.
"""

# TileLang programs: `T` is the language's own name, macros take tensors without annotations, bodies are long.
# ruff: noqa: C901, N812, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.pieces import scalar
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import begin_batch
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F32, bf16, f32
from ablate.kernels.mamba3_mimo.cuda.shape import LINE, SWIZZLE_128, ScanShape


class Rows:
    """Ranks and tokens of a lane's rows."""

    def __init__(self, s: ScanShape) -> None:
        self.ranks, self.chunk, self.tokens = s.R, s.C, 16 // s.R
        self.different = 2 if s.R == 1 else 1
        """Tokens in a lane's two rows."""

    def rank(self, line: Any, upper: Any) -> Any:
        """Return the rank of row `line` (0 to 7) of the lower or upper 8."""
        return 0 if self.ranks == 1 else line // self.tokens + 8 // self.tokens * upper

    def token(self, warp: Any, line: Any, upper: Any) -> Any:
        """Return the token of that row in the chunk."""
        if self.ranks == 1:
            return warp * 16 + upper * 8 + line
        return warp * self.tokens + line % self.tokens

    def distance(self, upper: int) -> int:
        """Return the distance from a lane's lower row to its upper row in (rank, time) order."""
        return upper * (8 if self.ranks == 1 else 8 // self.tokens * self.chunk)

    def meets(self, upper: int, block: int) -> bool:
        """Return whether one of the lower or upper 8 rows may have the rank of this group of 8 columns of scores."""
        return self.ranks == 1 or block * 8 // self.chunk // (8 // self.tokens) == upper


def lifts(s: ScanShape) -> bool:
    """Return whether the lifted form supports `s`: one warp group, whole panels of 64 columns, enough registers."""
    return s.M == 64 and s.N % 64 == 0 and s.P % 64 == 0 and s.N * s.P <= 64 * 128


def make_lift(s: ScanShape, loads: Any) -> tuple[Any, Any]:
    """Return macros hold(held, bias [H,R,N], h, tx) and lift(left, raw_s, held, cs_s, n, tx): rotated q in registers.

    left, held [N / 2] bf16 have the order of ldmatrix: per 16 columns the lower half's columns of both rows, then the
    upper half's.
    """
    A, C, half, steps = s.A, s.C, s.N // 2, s.N // 16
    rows = Rows(s)

    @T.macro
    def hold(held, bias, h, tx):
        for step in T.unroll(steps):
            for part in (0, 1):
                for upper in (0, 1):
                    for e in T.vectorized(2):
                        held[step * 8 + part * 4 + upper * 2 + e] = bias[
                            h, rows.rank(tx % 32 // 4, upper), part * half + step * 8 + tx % 4 * 2 + e
                        ]

    @T.macro
    def lift(left, raw_s, held, cs_s, n, tx):
        lo, hi = T.alloc_local((2,), F32), T.alloc_local((2,), F32)
        cos, sin = T.alloc_local((4,), F32), T.alloc_local((4,), F32)
        row = rows.rank(tx % 8, tx // 8 % 2) * C + rows.token(tx // 32, tx % 8, tx // 8 % 2)
        for step in T.unroll(steps):
            source = raw_s[loads.at(n, row, tx // 16 % 2 * half + step * 8)]
            T.ptx_ldmatrix(
                T.bool(False), 4, T.access_ptr(source, "r", extent=8), T.access_ptr(left[step * 8], "w", extent=8)
            )
        for step in T.unroll(A // 8, steps):
            for e in T.vectorized(8):
                left[step * 8 + e] = left[step * 8 + e] + held[step * 8 + e]
        for step in T.unroll(A // 8):
            at = loads.slot(n) * (A // 4) + step * 2
            for which in tuple(range(rows.different)):
                for e in T.vectorized(2):
                    cos[which * 2 + e] = f32(cs_s[at, rows.token(tx // 32, tx % 32 // 4, which), tx % 4 * 2 + e])
                for e in T.vectorized(2):
                    sin[which * 2 + e] = f32(cs_s[at + 1, rows.token(tx // 32, tx % 32 // 4, which), tx % 4 * 2 + e])
            for upper in (0, 1):
                turn = upper * 2 * (rows.different - 1)
                for e in T.vectorized(2):
                    lo[e] = f32(left[step * 8 + upper * 2 + e]) + f32(held[step * 8 + upper * 2 + e])
                for e in T.vectorized(2):
                    hi[e] = f32(left[step * 8 + 4 + upper * 2 + e]) + f32(held[step * 8 + 4 + upper * 2 + e])
                for e in T.vectorized(2):
                    left[step * 8 + upper * 2 + e] = bf16(scalar.turned(lo[e], hi[e], cos[turn + e], sin[turn + e]).lo)
                for e in T.vectorized(2):
                    left[step * 8 + 4 + upper * 2 + e] = bf16(
                        scalar.turned(lo[e], hi[e], cos[turn + e], sin[turn + e]).hi
                    )

    return hold, lift


def make_state(s: ScanShape) -> tuple[Any, Any, Any]:
    """Return macros read(state, source, b, h, tx), write(target [N,P], state, tx), hand_on(target, state, b, h, tx).

    state [N * P / 128] fp32 holds the thread's numbers. `source` and the target of `hand_on` are [B,H,N,P].
    """
    N, P = s.N, s.P

    def row(j: Any, c: Any, tx: Any) -> Any:
        return (j * 4 + tx // 32) * 8 + tx % 32 // 4 + c % 2 * (N // 2)

    @T.macro
    def read(state, source, b, h, tx):
        for j in T.unroll(N // 64):
            for c in T.unroll(P // 4):
                for e in T.vectorized(2):
                    state[j * (P // 2) + c * 2 + e] = source[b, h, row(j, c, tx), c // 2 * 8 + tx % 4 * 2 + e]

    @T.macro
    def write(target, state, tx):
        for j in T.unroll(N // 64):
            for c in T.unroll(P // 4):
                for e in T.vectorized(2):
                    target[row(j, c, tx), c // 2 * 8 + tx % 4 * 2 + e] = bf16(state[j * (P // 2) + c * 2 + e])

    @T.macro
    def hand_on(target, state, b, h, tx):
        for j in T.unroll(N // 64):
            for c in T.unroll(P // 4):
                for e in T.vectorized(2):
                    target[b, h, row(j, c, tx), c // 2 * 8 + tx % 4 * 2 + e] = state[j * (P // 2) + c * 2 + e]

    return read, write, hand_on


def make_products(s: ScanShape) -> tuple[Any, Any, Any, Any]:
    """Return four macros: one prepares the descriptors of shared operands, three start products with them.

    - prepare(entering, written, left, right, values, h_s, k_s, x_s, xw_s)
    - read(y, score, left, entering, written): y = q~ H and score = q~ k~^T
    - write(state, left, right): state += k~^T xw
    - mix(y, mixed, values): y += mixed x

    The caller waits for the products.
    """
    M, N, P = s.M, s.N, s.P
    steps, panels = N // 16, P // 64

    @T.macro
    def prepare(entering, written, left, right, values, h_s, k_s, x_s, xw_s):
        # the second 8 rows of a step belong to the other half
        T.initialize_wgmma_descriptor(entering, h_s.access_ptr("r"), SWIZZLE_128, 0, N // 2 * LINE >> 4)
        T.initialize_wgmma_descriptor(written, k_s.access_ptr("r"), SWIZZLE_128, 1, 8 * LINE >> 4)
        T.initialize_wgmma_descriptor(left, k_s.access_ptr("r"), SWIZZLE_128, 0, 8 * LINE >> 4)
        T.initialize_wgmma_descriptor(right, xw_s.access_ptr("r"), SWIZZLE_128, 0, 8 * LINE >> 4)
        T.initialize_wgmma_descriptor(values, x_s.access_ptr("r"), SWIZZLE_128, 0, 8 * LINE >> 4)

    @T.macro
    def read(y, score, left, entering, written):
        begin_batch(left, y, score)
        for q in T.unroll(panels):
            for step in T.unroll(steps):
                T.ptx_wgmma_rs(
                    F32, "m64n64k16", False, "bf16", "bf16", "fp32", left.data, step * 8, entering.data,
                    (q * N * LINE + step * 8 * LINE) >> 4, y.data, q * 32, T.Select(step > 0, 1, 0), 1, 1,
                )  # fmt: skip
        for step in T.unroll(steps):
            T.ptx_wgmma_rs(
                F32, "m64n64k16", True, "bf16", "bf16", "fp32", left.data, step * 8, written.data,
                (step // 4 * M * LINE + step % 4 * 32) >> 4, score.data, 0, T.Select(step > 0, 1, 0), 1, 1,
            )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def write(state, left, right):
        begin_batch(state)
        for j in T.unroll(N // 64):
            for q in T.unroll(panels):
                for step in T.unroll(M // 16):
                    T.ptx_wgmma_ss(
                        F32, "m64n64k16", False, False, "bf16", "bf16", "fp32", left.data,
                        (j * M + step * 16) * LINE >> 4, right.data, (q * M + step * 16) * LINE >> 4,
                        state.data, (j * panels + q) * 32, 1, 1, 1,
                    )  # fmt: skip
        T.warpgroup_commit_batch()

    @T.macro
    def mix(y, mixed, right):
        begin_batch(mixed, y)
        for q in T.unroll(panels):
            for step in T.unroll(M // 16):
                T.ptx_wgmma_rs(
                    F32, "m64n64k16", False, "bf16", "bf16", "fp32", mixed.data, step * 8, right.data,
                    (q * M + step * 16) * LINE >> 4, y.data, q * 32, 1, 1, 1,
                )  # fmt: skip
        T.warpgroup_commit_batch()

    return prepare, read, write, mix


def make_pair_weights(s: ScanShape) -> tuple[Any, Any, Any]:
    """Return the size of w and macros weights(w, lc_s, sk_s, gm_s, at, tx), mixed(mixed, score, w, skip, tx).

    w holds the lane's weights of the write of token u in the output of token t. `mixed` bf16 receives the weighted
    scores, plus `skip` for a row with itself.
    """
    C, rows = s.C, Rows(s)
    parts = C // 8

    @T.macro
    def weights(w, lc_s, sk_s, gm_s, at, tx):
        for which in tuple(range(rows.different)):
            t = rows.token(tx // 32, tx % 32 // 4, which)
            for part in T.unroll(parts):
                for e in T.unroll(2):
                    u = part * 8 + tx % 4 * 2 + e
                    w[(which * parts + part) * 2 + e] = scalar.pair_weight(
                        t, u, lc_s[at + t], lc_s[at + u], sk_s[at + u], gm_s[at + t]
                    )

    @T.macro
    def mix(mixed, score, w, skip, tx):
        for upper in (0, 1):
            line, first = tx % 32 // 4, upper * (rows.different - 1) * parts
            # the same comparisons for both rows
            own = rows.rank(line, 0) * C + rows.token(tx // 32, line, 0) - tx % 4 * 2
            for block in tuple(range(s.M // 8)):
                column = block * 8 - rows.distance(upper)
                for e in T.vectorized(2):
                    mixed[block * 4 + upper * 2 + e] = bf16(
                        score[block * 4 + upper * 2 + e] * w[(first + block % parts) * 2 + e]
                        + (scalar.skipped(own == column + e, skip) if rows.meets(upper, block) else 0.0)
                    )

    return 2 * parts * rows.different, weights, mix


def make_epilogue(s: ScanShape) -> tuple[Any, Any]:
    """Return macros load(gates_s [R,2P+4], zeta, phi, h, tx) and finish(y, o, z_s, gates_s, b, h, t0, first, tx).

    gates_s holds zeta / 2 and phi of two columns, then of the next two. `finish` applies the output gate and phi, adds
    up the ranks and writes o. z of the chunk starts at row `first` of z_s.
    """
    R, P, rows = s.R, s.P, Rows(s)
    # lanes 16, then 8 apart hold the other ranks of a token, if a lane's two rows are not all ranks
    levels = {1: 0, 2: 0, 4: 1, 8: 2}[R]

    @T.macro
    def load(gates_s, zeta, phi, h, tx):
        for i in T.serial(T.ceildiv(R * P, 128)):
            at = i * 128 + tx
            if at < R * P:
                if s.gated:
                    gates_s[at // P, at % P // 2 * 4 + at % 2] = 0.5 * zeta[h, at // P, at % P]
                if s.reduced:
                    gates_s[at // P, at % P // 2 * 4 + 2 + at % 2] = phi[h, at // P, at % P]

    @T.macro
    def fetched(z, z_s, first, tx):
        for which in tuple(range(rows.different)):
            for quad in T.unroll(P // 32):
                source = z_s[first + rows.token(tx // 32, tx % 8, which), (quad * 4 + tx // 8 % 4) * 8]
                T.ptx_ldmatrix(
                    T.bool(False), 4, T.access_ptr(source, "r", extent=8),
                    T.access_ptr(z[(which * (P // 8) + quad * 4) * 2], "w", extent=8),
                )  # fmt: skip

    @T.macro
    def output_gate(y, z_s, gates_s, first, tx):
        zeta, half_u = T.alloc_local((4,), F32), T.alloc_local((2,), F32)
        z, line = T.alloc_local((rows.different * P // 4,), BF16), tx % 32 // 4
        if s.gated:
            fetched(z, z_s, first, tx)
        for block in T.unroll(P // 8):
            for upper in (0, 1):
                for e in T.vectorized(4):
                    zeta[e] = gates_s[rows.rank(line, upper), (block * 4 + tx % 4) * 4 + e]
                if s.gated:
                    here = (upper * (rows.different - 1) * (P // 8) + block) * 2
                    for e in T.vectorized(2):
                        half_u[e] = f32(z[here + e]) * zeta[e]
                    for e in T.unroll(2):
                        y[block * 4 + upper * 2 + e] *= scalar.silu(half_u[e], scalar.bent(half_u[e]))
                if s.reduced:
                    for e in T.unroll(2):
                        y[block * 4 + upper * 2 + e] *= zeta[2 + e]

    @T.macro
    def summed(y, tx):
        if R > 1:
            for block in T.unroll(P // 8):
                for e in T.unroll(2):
                    y[block * 2 + e] = y[block * 4 + e] + y[block * 4 + 2 + e]
        for level in tuple(range(levels)):
            other = (tx & (16 >> level)) > 0
            for block in T.unroll(P // 16 >> level):
                for e in T.unroll(2):
                    away = T.if_then_else(other, y[block * 4 + e], y[block * 4 + 2 + e])
                    kept = T.if_then_else(other, y[block * 4 + 2 + e], y[block * 4 + e])
                    y[block * 2 + e] = kept + T.shfl_xor(away, 16 >> level)

    @T.macro
    def finish(y, o, z_s, gates_s, b, h, t0, first, tx):
        line = tx % 32 // 4
        if s.gated or s.reduced:
            output_gate(y, z_s, gates_s, first, tx)
        if s.reduced and R > 1:
            summed(y, tx)
            # the lane keeps every second group of 8 columns, or every fourth
            kept = (tx // 16 % 2 if levels > 0 else 0) + (tx // 8 % 2 * 2 if levels > 1 else 0)
            for block in T.unroll(P // 8 >> levels):
                for e in T.vectorized(2):
                    o[b, t0 + rows.token(tx // 32, line, 0), h, ((block << levels) + kept) * 8 + tx % 4 * 2 + e] = bf16(
                        y[block * 2 + e]
                    )
        else:
            for upper in (0, 1):
                for block in T.unroll(P // 8):
                    for e in T.vectorized(2):
                        head = (h,) if s.reduced else (rows.rank(line, upper), h)
                        o[b, t0 + rows.token(tx // 32, line, upper), *head, block * 8 + tx % 4 * 2 + e] = bf16(
                            y[block * 4 + upper * 2 + e]
                        )

    return load, finish
