"""B3 in the form of lifted.py: six barriers per chunk, where the form of gradients.py has thirteen."""

# TileLang programs: tensors are positional and annotated with calls, `T` is the language's own name.
# ruff: noqa: C901, N812, PLR0913, PLR0915, PLR0917

from typing import Any

import tilelang.language as T
from tilelang import PassConfigKey

from ablate.kernels.mamba3_mimo.cuda.backward import gradients_io as io
from ablate.kernels.mamba3_mimo.cuda.backward import groups, lifted_io
from ablate.kernels.mamba3_mimo.cuda.backward.head_sums import make_settled
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_chunk import make_chunk
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_layout import (
    WalkTiles,
    annotate_tiles,
    groups_of,
    make_operands,
    make_registers,
)
from ablate.kernels.mamba3_mimo.cuda.backward.lifted_steps import (
    COPYING_REGISTERS,
    computing,
    computing_registers,
    make_pace,
    threads_of,
)
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import make_loads
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import column, row
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import takes, writes_first
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32, UNPACKED
from ablate.kernels.mamba3_mimo.cuda.shape import GROUP, ScanShape, Variant


def gradients(s: ScanShape, v: Variant) -> Any:
    """B3. `gradients.gradients` documents its inputs and outputs."""
    B, N, P, R, A, C, M, nc = s.B, s.N, s.P, s.R, s.A, s.C, s.M, s.chunks
    alone, roles, threads, loads = groups_of(s) == 1, v.warp_specialize, computing(s), make_loads(s, v)
    settled = make_settled(v)

    @T.macro
    def hold(E, tensor, b, h, tx):
        for lower in (0, 1):
            for block in T.unroll(8):
                for e in T.unroll(2):
                    E[block * 4 + lower * 2 + e] = tensor[b, h, column(tx, block, groups_of(s)) + e, row(tx, lower)]

    @T.macro
    def hand_on(E, tensor, b, h, tx):
        for lower in (0, 1):
            for block in T.unroll(8):
                for e in T.unroll(2):
                    tensor[b, h, column(tx, block, groups_of(s)) + e, row(tx, lower)] = E[block * 4 + lower * 2 + e]

    @T.macro
    def weights(at, q_bias, k_bias, psi, zeta, phi, h):
        T.copy(q_bias[h : h + 1, :, :], at.q_bias_s, disable_tma=True)
        T.copy(k_bias[h : h + 1, :, :], at.k_bias_s, disable_tma=True)
        for p, r in T.Parallel(P, R):
            at.psi_s[p, r] = psi[h, r, p]
            if s.gated:
                at.half_zeta_s[p, r] = 0.5 * zeta[h, r, p]
                at.zeta_s[p, r] = 0.5 * zeta[h, r, p] * (phi[h, r, p] if s.reduced else 1.0)
            if s.reduced:
                at.phi_s[p, r] = phi[h, r, p]

    @T.macro
    def heads(pace, written, sums_out, chunk, at, mine, given, b, i, tx):
        q_bias, k_bias, psi, zeta, phi, D, leaving, leaves = given
        pace.begin(tx)
        # one loop over the steps of all heads, so that the compiler keeps the descriptors in place
        for step in T.serial(pace.steps):
            h = pace.head(step)
            if step % nc == 0:
                weights(at, q_bias, k_bias, psi, zeta, phi, h)
                if leaves > 0:
                    hold(mine.E, leaving, b, h, tx)
                else:
                    for c in T.unroll(32):
                        mine.E[c] = 0.0
                mine.skip[0] = D[h]
                for total in (mine.d, mine.psi, mine.zeta, mine.phi, mine.q_bias, mine.k_bias):
                    for c in T.unroll(total.shape[0]):
                        total[c] = 0.0
                pace.meet()
            chunk(b, i, h, (nc - 1 - step % nc) * C, step, tx)
            if step % nc == nc - 1:
                settled()
                if writes_first(s, v):
                    hand_on(mine.E, written.first, b, h, tx)
                sums_out(b, h, tx)

    @T.prim_func
    @takes(s, v, d_out="do")
    def b3_gradients(
        q, k, v_, z, d_out, q_bias, k_bias, psi, zeta, phi, D, cs, lc, sk, gm, states, leaving, psiv,
        dqh, dkh, dv, dz, dtheta, row_q, row_k, same, diag, p_psi, p_zeta, p_phi, edges, first, p_heads,
        in_turn: T.int32, leaves: T.int32,
    ):  # fmt: skip
        with T.Kernel(s.sums, B, threads=threads_of(s, v)) as (i, b):
            T.assume(b < s.most_walks)  # allows 32-bit offsets if the walks do
            T.annotate_pass_configs({PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: True})
            T.import_source(UNPACKED)
            if roles:
                T.annotate_min_blocks_per_sm(2 // groups_of(s))  # as many as fit, see lifted_layout.lifts
            # the compiler lays buffers out by name: aligned ones should not stand between others
            q_raw, k_raw, bar = loads.tile(), loads.tile(), loads.barriers(GROUP if roles else threads)
            free = T.alloc_barrier([threads] * loads.slots) if roles else None
            q_s, k_s, e_s = T.alloc_shared((M, N), BF16), T.alloc_shared((M, N), BF16), T.alloc_shared((P, N), BF16)
            x_s, g_s, mix_s, dmix_s = (T.alloc_shared((64, 64), BF16) for _ in range(4))
            # with two groups, no group has all columns of a left operand or of separate rows
            mixt_s = None if alone else T.alloc_shared((64, 64), BF16)
            # k's slot is free from the rotation until the next copies start, but a warp that only copies waits for it
            lent = k_raw if loads.two_d and not roles else None
            gw_s = lent if alone else T.alloc_shared((64, 64), BF16)
            dq_s, dk_s = (g_s, x_s) if alone else (T.alloc_shared((M, N), BF16) for _ in range(2))
            h_s = T.alloc_shared((loads.slots * N, P), BF16)
            v_s = T.alloc_shared((loads.held * C, P), BF16)
            z_s = T.alloc_shared((loads.slots * C, P), BF16)
            do_s = T.alloc_shared((loads.slots * (C if s.reduced else M), P), BF16)
            cs_s = T.alloc_shared((loads.held * (A // 4), C, 8), F16)
            scalar_s = T.alloc_shared((loads.held * 3, C), F32)
            turn_s = T.alloc_shared((M, A + 8), F32)
            row_s, sum_s = T.alloc_shared((2, M), F32), T.alloc_shared((4, 2, C), F32)
            line_s, total_s = T.alloc_shared((4, 2, N), F32), T.alloc_shared((threads // 32,), F32)
            qb_s, kb_s = T.alloc_shared((1, R, N), BF16), T.alloc_shared((1, R, N), BF16)
            psi_s, half_zeta_s, zeta_s, phi_s = (T.alloc_shared((P, R), F32) for _ in range(4))
            at = WalkTiles(
                q_raw=q_raw, k_raw=k_raw, q_s=q_s, k_s=k_s, x_s=x_s, g_s=g_s, gw_s=gw_s, e_s=e_s, mix_s=mix_s,
                mixt_s=mixt_s, dmix_s=dmix_s, h_s=h_s, dq_s=dq_s, dk_s=dk_s, v_s=v_s, z_s=z_s, do_s=do_s, cs_s=cs_s,
                scalar_s=scalar_s, turn_s=turn_s, row_s=row_s, sum_s=sum_s, line_s=line_s, total_s=total_s,
                q_bias_s=qb_s, k_bias_s=kb_s, psi_s=psi_s, half_zeta_s=half_zeta_s, zeta_s=zeta_s, phi_s=phi_s,
                bar=bar,
            )  # fmt: skip
            annotate_tiles(at, loads)
            mine, tx = make_registers(s), T.get_thread_binding()
            given = groups.Given(q=q, k=k, v=v_, z=z, do=d_out, cs=cs, lc=lc, sk=sk, gm=gm, states=states, psiv=psiv)
            written = groups.Written(
                dqh=dqh, dkh=dkh, dv=dv, dz=dz, dtheta=dtheta, row_q=row_q, row_k=row_k, same=same, diag=diag,
                edges=edges, p_psi=p_psi, p_zeta=p_zeta, p_phi=p_phi, p_heads=p_heads,
                first=first,
            )  # fmt: skip
            start = io.make_start(s, v, loads, given, at, turns_held=True, copying=threads if roles else 0)
            pace = make_pace(s, v, loads, start, free, b, i, in_turn)
            group = 0 if alone else T.shfl_sync(tx // GROUP, 0)  # shows the compiler that a warp agrees
            chunk = make_chunk(s, v, loads, pace, written, at, mine, make_operands(s, at, group))
            sums_out = lifted_io.make_sums_out(s, at, mine, written, pace.meet)

            given_head = (q_bias, k_bias, psi, zeta, phi, D, leaving, leaves)
            if roles:
                if tx < threads:
                    T.set_max_nreg(computing_registers(s), 1)
                    heads(pace, written, sums_out, chunk, at, mine, given_head, b, i, tx)
                else:
                    T.set_max_nreg(COPYING_REGISTERS, 0)
                    pace.copies(tx)
            else:
                heads(pace, written, sums_out, chunk, at, mine, given_head, b, i, tx)

    return b3_gradients
