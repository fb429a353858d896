"""B3, the backward walk: one reverse pass over each super-chunk yields all gradients.

E is the gradient of the loss with respect to the leaving state of a chunk. g = dO * phi * silu(u), with u = z * zeta,
is the gradient with respect to y. Rows are (rank, time), i = r * C + c. Letters: see shape.py. Scalars per token: see
prefix.py.
"""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name, bodies are long.
# ruff: noqa: C901, N812, PLR0912, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey
from tilelang.layout import make_swizzled_layout

from ablate.kernels.mamba3_mimo.cuda.backward import gradients_io as io
from ablate.kernels.mamba3_mimo.cuda.backward import gradients_lifted, groups
from ablate.kernels.mamba3_mimo.cuda.backward.gradients_chunk import make_chunk
from ablate.kernels.mamba3_mimo.cuda.backward.gradients_tiles import firsts
from ablate.kernels.mamba3_mimo.cuda.backward.head_sums import make_bias_sums, place_of_d
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import lifts
from ablate.kernels.mamba3_mimo.cuda.pieces import tiles
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import make_loads, make_store
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes, writes_first
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, UNPACKED
from ablate.kernels.mamba3_mimo.cuda.shape import SHARED_LIMIT, ScanShape, Variant

WRONG_OUTPUTS = ((32, 128, 2, 32), (32, 64, 1, 32), (16, 128, 1, 32))
"""N, P, R, M of programs of which many have wrong outputs by ptxas up to CUDA 13.2, see host/machine_code.py."""


def shared_bytes(s: ScanShape, v: Variant) -> int:
    """Return the bytes of shared memory of a block."""
    return _least_bytes(s, v) + (2 * s.M * s.P if owns(s, v) else 0)


def owns(s: ScanShape, v: Variant) -> bool:
    """Return whether gw has a buffer of its own: if no other can hold it, or if that costs no block per processor."""
    if io.lends(s, v):
        return False
    least, own = _least_bytes(s, v), 2 * s.M * s.P
    return s.M < s.P or least + own <= (SHARED_LIMIT if 2 * least > SHARED_LIMIT else SHARED_LIMIT // 2)


def _least_bytes(s: ScanShape, v: Variant) -> int:
    """Return the bytes without gw's own buffer, including barriers, sums and alignment, which is more for two slots."""
    C, M, N, P, R, two = s.C, s.M, s.N, s.P, s.R, io.threads_of(s) // 128
    slots, held = max(1, v.pipeline_stages), v.pipeline_stages + 1
    halves = 2 * M * N * (slots + 1) + M * P * (1 + (held if v.psiv_cache else 1)) + N * P * (slots + 1) + 2 * M * M
    halves += 0 if N == P or not s.gated else M * P
    halves += P * (held * C + slots * (C * s.gated + (C if s.reduced else M))) + slots * s.A * C * 2 + 2 * R * N
    words = C * (C + 8) + M * (s.A + 4) + (2 + 2 * two) * M + 2 * two * N + 2 * M * R + held * 3 * C
    words += R * P * (1 + 2 * s.gated + s.reduced)
    return 2 * halves + 4 * words + 2048 * two + (4096 if v.pipeline_stages == 2 else 0)


def refusals(v: Variant, s: ScanShape) -> tuple[tuple[bool, str], ...]:
    """Return the limits of this walk."""
    need, two_groups = shared_bytes(s, v), io.threads_of(s) == 256
    return (
        (
            need > SHARED_LIMIT,
            f"the walk needs {need} bytes of shared memory (N={s.N}, P={s.P}, {s.M} rows); allowed: {SHARED_LIMIT}",
        ),
        (
            v.pipeline_stages == 2 and two_groups and 32 in {s.P, s.M},
            f"pipeline_stages is 2 with P = {s.P}, {s.M} rows and two warp groups; allowed: 0, 1, because one slot is "
            "not contiguous in the compiler's layout of two slots of states (plain SMEM layout is not a bijection)",
        ),
        (
            (s.N, s.P, s.M) == (64, 128, 32),
            "chunk_size * rank is 32 with N = 64 and P = 128; allowed: 64, because the compiler finds no layout for "
            "the half tiles (plain SMEM layout is not a bijection)",
        ),
        (
            (s.N, s.P, s.M) == (16, 128, 64),
            "chunk_size * rank is 64 with N = 16 and P = 128; allowed: 32, because the compiler gives one tile two "
            "layouts (Get different layout for k_s)",
        ),
        (
            v.psiv_cache and (s.M > 64 or s.M * s.P > 64 * 64),
            f"psiv_cache with {s.M} rows of width {s.P} in a chunk; allowed: up to 64 rows and 64 * 64 numbers, "
            "because gradients from larger cached tiles were wrong on a GPU",
        ),
        (
            v.psiv_cache and two_groups and (s.M, v.pipeline_stages) != (64, 0),
            f"psiv_cache with state size {s.N}, head width {s.P}, {s.M} rows in a chunk and pipeline_stages "
            f"{v.pipeline_stages}, which takes two warp groups; allowed: 64 rows with pipeline_stages 0, because with "
            "loads in flight the gradients of z, zeta and phi were wrong on a GPU, and tiles of 32 rows do not compile",
        ),
        (
            (s.N, s.P, s.R, s.M) in WRONG_OUTPUTS,
            f"rank {s.R} with N = {s.N}, P = {s.P} and chunk_size {s.C}; allowed: another rank or chunk_size, because "
            "ptxas up to CUDA 13.2 assembles the forward kernel wrongly",
        ),
    )


def gradients(s: ScanShape, v: Variant) -> Any:
    """B3: walk the chunks of a super-chunk backwards from E and write every gradient or its partial sums.

    Outputs:

    - dqh, dkh bf16 [B,sums,S/C,M,N], per head or, in the lifted form, summed over `in_turn` heads; dv, dz bf16
    - dtheta fp32 [B,H,S,A] with respect to the cumulated angle
    - per token fp32 [B,H,S]: `row_q` = <q~, dq~> and `row_k` = <k~, dk~>, the same token's share `diag` in both, and
      `same`, the same token's d/dgamma. y is linear in q~ and bilinear in k~ and x, so `row_q` = <g, y> and
      `row_k` = <x, dx>
    - partial sums over one super-chunk: `p_psi`, `p_zeta`, `p_phi` [B,H,M/8,P], one per 8 rows, and `p_heads` of the
      biases of q and k and of D, see `place_of_d`
    - `edges`, see `make_edge`
    - `first` fp32 [B,H,N,P], the gradient of the rows' entering state, only in the sequential schedule; otherwise
      reversed F2 has it

    z, zeta, dz and p_zeta exist only if gated, phi and p_phi only if reduced (else dO is [B,S,R,H,P]), and psiv bf16
    [B,H,S/C,M,P] only with `psiv_cache`. `leaves` is 0 if no state leaves. Then `leaving` is not read.
    """
    if lifts(s, v):
        return gradients_lifted.gradients(s, v)
    B, H, N, P, R, A, C, M, L = s.B, s.H, s.N, s.P, s.R, s.A, s.C, s.M, s.L
    threads, loads = io.threads_of(s), make_loads(s, v)
    turning, depth = tiles.spread(s, threads).angles, A // 4
    across, along, sums_out = io.columns_of(s, M), io.columns_of(s, N), io.make_sums_out(s)
    (_, stored), (_, bias_out) = make_store(v), make_bias_sums(s)
    x_rows, sum_rows = io.x_slots(v, loads) * M, io.fold_of(s)(M - 1) + 1

    @T.prim_func
    @takes(s, v, d_out="do")
    def b3_gradients(
        q, k, v_, z, d_out, q_bias, k_bias, psi, zeta, phi, D, cs, lc, sk, gm, states, leaving, psiv,
        dqh, dkh, dv, dz, dtheta, row_q, row_k, same, diag, p_psi, p_zeta, p_phi, edges, first, p_heads,
        in_turn: T.int32, leaves: T.int32,
    ):  # fmt: skip
        with T.Kernel(H, B, threads=threads) as (h, b):
            T.assume(b < s.most_walks)  # allows 32-bit offsets if the walks do
            # the barriers below suffice unless the compiler overlaps buffers
            T.annotate_pass_configs({PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: not v.aggressive_smem_merge})
            T.import_source(UNPACKED)
            q_raw, k_raw, bar = loads.tile(), loads.tile(), loads.barriers(threads)
            q_s, k_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16)
            x_s, g_s = T.alloc_shared((x_rows, P), BF16), T.alloc_shared((M, P), BF16)
            h_s, e_s = T.alloc_shared((loads.slots * N, P), BF16), T.alloc_shared((N, P), BF16)
            mix_s, dmix_s = T.alloc_shared((M, M), BF16), T.alloc_shared((M, M), BF16)
            gw_s = q_raw if io.lends(s, v) else T.alloc_shared((M, P), BF16) if owns(s, v) else dmix_s
            dgate_s = k_raw if N == P else T.alloc_shared((M, P), BF16)
            w_s = T.alloc_shared((C, C + 8), F32)
            turn_s = T.alloc_shared((M, A + 4), F32)
            row_s = T.alloc_shared((2 + 2 * across.groups, M), F32)
            line_s = T.alloc_shared((2 * along.groups, N), F32)
            same_s, dsame_s = T.alloc_shared((M, R), F32), T.alloc_shared((M, R), F32)
            v_s = T.alloc_shared((loads.held * C, P), BF16)
            z_s = T.alloc_shared((loads.slots * C, P), BF16)
            do_s = T.alloc_shared((loads.slots * (C if s.reduced else M), P), BF16)
            cs_s = T.alloc_shared((loads.slots * depth, C, 8), F16)
            scalar_s = T.alloc_shared((loads.held * 3, C), F32)
            qb_s, kb_s = T.alloc_shared((1, R, N), BF16), T.alloc_shared((1, R, N), BF16)
            psi_s, half_zeta_s, zeta_s, phi_s = (T.alloc_shared((R, P), F32) for _ in range(4))
            cos, sin = (T.alloc_local((turning,), F16) for _ in range(2))
            turn = T.alloc_local((turning,), F32)
            E = T.alloc_fragment((N, P), F32)
            score, dscore = T.alloc_fragment((M, M), F32), T.alloc_fragment((M, M), F32)
            y, dn, dk = T.alloc_fragment((M, P), F32), T.alloc_fragment((M, N), F32), T.alloc_fragment((M, N), F32)
            g, gw, dgate = (T.alloc_fragment((M, P), BF16) for _ in range(3))
            row, part_row = T.alloc_fragment((M, across.groups), F32), T.alloc_fragment((M, *across[:2]), F32)
            line, part_line = T.alloc_fragment((N, along.groups), F32), T.alloc_fragment((N, *along[:2]), F32)
            d_row = T.alloc_fragment((M,), F32)
            total, skip = T.alloc_fragment((1,), F32), T.alloc_local((1,), F32)
            psi_acc, zeta_acc, phi_acc = (T.alloc_fragment((sum_rows, P), F32) for _ in range(3))
            dq_bias, dk_bias = T.alloc_fragment((R, N), F32), T.alloc_fragment((R, N), F32)
            swizzled = (q_raw, k_raw) if loads.two_d else ()
            T.annotate_layout({tile: make_swizzled_layout(tile) for tile in (*swizzled, v_s, z_s, do_s)})
            tensors = groups.Given(q=q, k=k, v=v_, z=z, do=d_out, cs=cs, lc=lc, sk=sk, gm=gm, states=states, psiv=psiv)
            written = groups.Written(
                dqh=dqh, dkh=dkh, dv=dv, dz=dz, dtheta=dtheta, row_q=row_q, row_k=row_k, same=same, diag=diag,
                edges=edges, p_psi=p_psi, p_zeta=p_zeta, p_phi=p_phi, p_heads=p_heads,
                first=first,
            )  # fmt: skip
            staged = groups.WalkStaging(
                q_raw=q_raw, k_raw=k_raw, v_s=v_s, z_s=z_s, do_s=do_s, cs_s=cs_s, scalar_s=scalar_s, h_s=h_s, x_s=x_s,
                bar=bar,
            )  # fmt: skip
            weights = groups.Weights(
                q_bias_s=qb_s, k_bias_s=kb_s, psi_s=psi_s, half_zeta_s=half_zeta_s, zeta_s=zeta_s, phi_s=phi_s,
                skip=skip,
            )  # fmt: skip
            ops = groups.ProductOperands(
                q_s=q_s, k_s=k_s, g_s=g_s, gw_s=gw_s, e_s=e_s, mix_s=mix_s, dmix_s=dmix_s, w_s=w_s, dgate_s=dgate_s
            )  # fmt: skip
            acc = groups.Products(E=E, score=score, dscore=dscore, y=y, dn=dn, dk=dk, g=g, gw=gw, dgate=dgate)
            sums = groups.Sums(
                row_s=row_s, row=row, part_row=part_row, line_s=line_s, line=line, part_line=part_line, same_s=same_s,
                dsame_s=dsame_s, d_row=d_row, psi_acc=psi_acc, zeta_acc=zeta_acc, phi_acc=phi_acc,
                q_bias=dq_bias, k_bias=dk_bias,
            )  # fmt: skip
            rotation = groups.Rotation(cos=cos, sin=sin, turn=turn, turn_s=turn_s)
            sink = T.alloc_local((1,), F32)
            start = io.make_start(s, v, loads, tensors, staged)
            lent = not (io.lends(s, v) or owns(s, v))
            chunk = make_chunk(
                s, v, loads, start, written, staged, weights, ops, acc, sums, rotation, sink, lent=lent
            )  # fmt: skip
            # buffers that copies access during other turns of the loop, and buffers that are filled before the loop
            own = (q_raw, k_raw, q_s, h_s, v_s, do_s, cs_s, scalar_s, qb_s, kb_s, psi_s)
            own += (x_s,) if v.psiv_cache else ()
            own += ((z_s, half_zeta_s, zeta_s) if s.gated else ()) + ((phi_s,) if s.reduced else ())
            tx = T.get_thread_binding()
            nc = L // C
            last = (nc - 1) * C
            for n in range(loads.ahead):
                if n < nc:
                    start(b, h, last - n * C, n, tx)
            T.copy(q_bias[h : h + 1, :, :], qb_s, disable_tma=True)
            T.copy(k_bias[h : h + 1, :, :], kb_s, disable_tma=True)
            for r, p in T.Parallel(R, P):
                psi_s[r, p] = psi[h, r, p]
                if s.gated:
                    half_zeta_s[r, p] = 0.5 * zeta[h, r, p]
                    zeta_s[r, p] = zeta[h, r, p] * (phi[h, r, p] if s.reduced else 1.0)
                if s.reduced:
                    phi_s[r, p] = phi[h, r, p]
            if v.aggressive_smem_merge:
                sink[0] = firsts(own)
            if leaves > 0:
                T.copy(leaving[b, h, :, :], E)
            else:
                T.clear(E)
            skip[0] = D[h]
            T.clear(psi_acc)
            if s.gated:
                T.clear(zeta_acc)
            if s.reduced:
                T.clear(phi_acc)
            T.clear(d_row)
            T.clear(dq_bias)
            T.clear(dk_bias)
            T.sync_threads()
            for n in T.serial(nc):
                chunk(b, h, last - n * C, n, nc, tx)
            stored()
            if writes_first(s, v):
                T.copy(E, first[b, h, :, :])
            sums_out(psi_acc, p_psi, b, h)
            if s.gated:
                sums_out(zeta_acc, p_zeta, b, h, phi_s if s.reduced else None)
            if s.reduced:
                sums_out(phi_acc, p_phi, b, h)
            bias_out(dq_bias, p_heads, 0, b, h)
            bias_out(dk_bias, p_heads, 1, b, h)
            T.reduce_sum(d_row, total, dim=0)
            for i in T.Parallel(1):
                p_heads[b, *place_of_d(s, h)] = total[i]
            if v.aggressive_smem_merge:
                sink[0] = firsts(own)

    return b3_gradients
