"""Backward kernel of the walk with two warp groups in different roles; see gradients.py for the mathematics.

The reader goes ahead: it rotates q, rebuilds y, takes the gate's gradient and yields dq, dz. The writer follows: it
rotates k, builds x, carries E and yields dk, dv. They hand tiles over through shared memory and mbarriers; what only
one of them needs stays in its registers. Letters: see shape.py; the spread of a matrix over threads: tiles_split.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: N812, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey
from tilelang.layout import make_swizzled_layout

from kernels.mamba3_mimo.cuda.backward.groups import Given, Written
from kernels.mamba3_mimo.cuda.backward.places_split import Block, pool_of
from kernels.mamba3_mimo.cuda.backward.reader import make_reader
from kernels.mamba3_mimo.cuda.backward.tiles_split import DEVICE_SOURCE, HANDS
from kernels.mamba3_mimo.cuda.backward.writer import make_writer
from kernels.mamba3_mimo.cuda.host.machine import GROUP, SHARED_LIMIT
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.cuda.pieces.tensors import takes, writes_first
from kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32

PASS_CONFIGS = {
    PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True,
    PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True,
    PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,
}
"""Compiler options of this kernel alone: it places its barriers and roles itself and stays within its tensors."""


def refusals(v: Variant, s: ScanShape) -> tuple[tuple[bool, str], ...]:
    """Return what the walk with two roles cannot do."""
    values, most = s.B * s.S * s.H * s.P, 2**31 - s.L * s.H * s.P
    return tuple(
        (v.warp_specialize and refused, reason)
        for refused, reason in (
            (not v.tma, "warp_specialize with tma off: the two warp groups wait for bulk copies only"),
            (not v.layout_2d, "warp_specialize with layout_2d off: the tiles are operands of matrix instructions"),
            (v.psiv_cache, "warp_specialize with psiv_cache: PsiV is built in registers"),
            (
                v.pipeline_stages == 0,
                "warp_specialize with pipeline_stages 0: the roles always have two chunks in flight",
            ),
            (
                v.aggressive_smem_merge,
                "warp_specialize with aggressive_smem_merge: both roles use their buffers at once",
            ),
            (not (s.gated and s.reduced), "warp_specialize without z or phi"),
            (s.N not in {64, 128}, f"warp_specialize with state size {s.N}; allowed: 64, 128"),
            (s.P != 64, f"warp_specialize with head width {s.P}; allowed: 64"),
            (s.M != 64, f"warp_specialize with chunk_size * rank = {s.M}; allowed: 64"),
            (s.A % 16 > 0, f"warp_specialize with {s.A} rotary angles; allowed: multiples of 16"),
            (s.R == 8, "warp_specialize with rank 8; allowed: 1, 2, 4, since time gradients were wrong on a GPU"),
            (
                s.L // s.C < 3,
                f"warp_specialize with {s.L // s.C} chunks in a super-chunk; allowed: 3 or more, since the "
                "compiler refuses the bulk copies of fewer states",
            ),
            (
                values > most,
                f"warp_specialize with B * S * H * P = {values}; allowed: {most}, since on its way to an offset of "
                "dv the generated code passes 2^31 in 32 bits",
            ),
            (
                shared_bytes(s) > SHARED_LIMIT,
                f"warp_specialize with state size {s.N} and chunk_size {s.C} takes {shared_bytes(s)} bytes of shared "
                f"memory; allowed: {SHARED_LIMIT}",
            ),
        )
    )


def shared_bytes(s: ScanShape) -> int:
    """Return the bytes of shared memory of one block, with room for alignment."""
    tables = 3 * s.A * s.C * 4 + 36 * s.C + 16 * s.C * s.C + 8 * s.C * s.A + 960 * s.R + 4 * s.R * s.N
    return pool_of(s).rows * 128 + tables + 2048


def gradients(s: ScanShape, v: Variant) -> Any:
    """B3 of gradients.py with the same tensors: every gradient or its partial sum, from one reverse pass."""
    B, S, H, G, N, P, R, A, C, L = s.B, s.S, s.H, s.G, s.N, s.P, s.R, s.A, s.C, s.L
    pool_at, reader, writer = pool_of(s), make_reader(s), make_writer(s, started=writes_first(s, v))
    weights = max(2 * C * C, 512)
    blocks = 2 if N == 64 and R >= 4 else 1

    @T.prim_func
    @takes(s, v)
    def b3_gradients(
        q, k, v, z, do, q_bias, k_bias, psi, zeta, phi, D, cs, lc, sk, gm, states, leaving,
        dqh, dkh, dv, dz, dtheta, row_q, row_k, same, diag, p_psi, p_zeta, p_phi, p_d, edges, first,
    ):  # fmt: skip
        with T.Kernel(H, B, threads=2 * GROUP) as (h, b):
            T.assume(b < s.most_walks)  # so offsets have 32 bits where these do
            T.annotate_pass_configs(PASS_CONFIGS)
            T.import_source(DEVICE_SOURCE)
            T.annotate_min_blocks_per_sm(blocks)
            q_rows, k_rows = (T.Tensor((B, S * R, G, N), BF16, t.data) for t in (q, k))
            dq_rows, dk_rows = (T.Tensor((B, S * R, H, N), BF16, t.data) for t in (dqh, dkh))
            pool = T.alloc_shared((pool_at.rows, 64), BF16)
            cs_s = T.alloc_shared((3 * (A // 4), C, 8), F16)
            sc_s = T.alloc_shared((3, 3, C), F32)
            w_s, wt_s = T.alloc_shared((weights,), F32), T.alloc_shared((weights,), F32)
            turn_s = T.alloc_shared((2, C, A), F32)
            tab_s = T.alloc_shared((3, R, 80), F32)
            bias_s = T.alloc_shared((2, R, N), BF16)
            full = T.alloc_barrier([32] * 5)
            hand = T.alloc_barrier([4] * HANDS)
            T.annotate_layout({pool: make_swizzled_layout(pool)})
            tx = T.get_thread_binding()
            here = T.alloc_local((1,), "int32")
            nc = L // C
            here[0] = T.call_extern("int32", "walk::shared", pool.access_ptr("rw"))
            base = here[0]
            skip = T.alloc_local((2,), F32)
            for e in T.unroll(2):
                skip[e] = T.if_then_else(tx % 4 * 2 + e == tx % 32 // 4, D[h], 0.0)
            for r, j in T.Parallel(R, P):
                at = j % 8 // 2 * 20 + j // 8 * 2 + j % 2
                tab_s[0, r, at] = 0.5 * zeta[h, r, j]
                tab_s[1, r, at] = phi[h, r, j]
                tab_s[2, r, at] = psi[h, r, j]
            for r, j in T.Parallel(R, N):
                at = j % 8 // 2 * (N // 4) + j // 8 * 2 + j % 2
                bias_s[0, r, at] = q_bias[h, r, j]
                bias_s[1, r, at] = k_bias[h, r, j]
            T.sync_threads()
            given = Given(
                q=q_rows, k=k_rows, v=v, z=z, do=do, cs=cs, lc=lc, sk=sk, gm=gm, states=states, psiv=None
            )  # fmt: skip
            written = Written(
                dqh=dq_rows, dkh=dk_rows, dv=dv, dz=dz, dtheta=dtheta, row_q=row_q, row_k=row_k, same=same, diag=diag,
                edges=edges, p_psi=p_psi, p_zeta=p_zeta, p_phi=p_phi, p_d=p_d, first=first,
            )  # fmt: skip
            block = Block(
                tx=tx, b=b, h=h, nc=nc, base=base, skip=skip, pool=pool, cs_s=cs_s, sc_s=sc_s, w_s=w_s, wt_s=wt_s,
                turn_s=turn_s, tab_s=tab_s, bias_s=bias_s, full=full, hand=hand,
            )  # fmt: skip
            if tx < GROUP:
                reader(block, given, written)
            else:
                writer(block, given, leaving, written)

    return b3_gradients
