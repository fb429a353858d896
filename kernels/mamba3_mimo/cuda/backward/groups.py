"""Groups of the tensors and buffers of B3 in one role, which are the parameters of its parts.

Buffers with `_s` lie in shared memory. The others are fragments, distributed over the threads of a block. A buffer is
None if the problem does not need it. Letters: see shape.py. Rows are i = r * C + c.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

Buffer: TypeAlias = Any
"""A buffer of a program."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Tensors that every chunk is loaded from, see `gradients`."""

    q: Buffer
    k: Buffer
    v: Buffer
    z: Buffer
    do: Buffer
    cs: Buffer
    lc: Buffer
    sk: Buffer
    gm: Buffer
    states: Buffer
    psiv: Buffer


@dataclass(frozen=True, kw_only=True)
class Written:
    """Tensors that the walk writes, see `gradients`."""

    dqh: Buffer
    dkh: Buffer
    dv: Buffer
    dz: Buffer
    dtheta: Buffer
    row_q: Buffer
    row_k: Buffer
    same: Buffer
    diag: Buffer
    edges: Buffer
    p_psi: Buffer
    p_zeta: Buffer
    p_phi: Buffer
    p_heads: Buffer
    first: Buffer


@dataclass(frozen=True, kw_only=True)
class WalkStaging:
    """Targets of copies, with a slot for every chunk in flight."""

    q_raw: Buffer
    """bf16 [M,N] or [R,C,N] per slot, see loads.py: q, later dq; k_raw: k, later the output gate's gradient."""
    k_raw: Buffer
    v_s: Buffer
    """bf16 [C,P] per held slot."""
    z_s: Buffer
    """bf16 [C,P] per slot."""
    do_s: Buffer
    """bf16 [C,P] per slot, or [M,P] without phi."""
    cs_s: Buffer
    """fp16 [A/4,C,8] per slot."""
    scalar_s: Buffer
    """fp32 [3,C] per held slot: lc, sk, gm."""
    h_s: Buffer
    """bf16 [N,P] per slot: the entering state of the chunk."""
    x_s: Buffer
    """bf16 [M,P]: x, with `psiv_cache` loaded and per held slot. Later the gradient of v per rank."""
    bar: Buffer
    """Barriers of the copies."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The head's weights, fp32 [R,P] unless stated otherwise."""

    q_bias_s: Buffer
    """bf16 [1,R,N]; k_bias_s likewise."""
    k_bias_s: Buffer
    psi_s: Buffer
    half_zeta_s: Buffer
    """zeta / 2."""
    zeta_s: Buffer
    """zeta phi."""
    phi_s: Buffer
    skip: Buffer
    """[1]: D."""


@dataclass(frozen=True, kw_only=True)
class ProductOperands:
    """Operands of products besides x and the entering state."""

    q_s: Buffer
    """bf16 [M,N]: q~, later dk; k_s likewise k~."""
    k_s: Buffer
    g_s: Buffer
    """bf16 [M,P]: g; gw_s is g times the decay from the start of the chunk."""
    gw_s: Buffer
    e_s: Buffer
    """bf16 [N,P]: E."""
    mix_s: Buffer
    """bf16 [M,M]: the weighted scores; dmix_s: their weighted gradients."""
    dmix_s: Buffer
    w_s: Buffer
    """fp32 [C,C+8]: the weights of the chunk, see `make_weigh`."""
    dgate_s: Buffer
    """bf16 [M,P]: the gradient of z zeta per rank, times zeta phi; may lie in k_raw."""


@dataclass(frozen=True, kw_only=True)
class Products:
    """Results of products, fp32, and their bf16 forms on the way to shared memory."""

    E: Buffer
    """[N,P]: the gradient of the leaving state of the chunk."""
    score: Buffer
    """[M,M]; dscore likewise."""
    dscore: Buffer
    y: Buffer
    """[M,P]: y, later dx."""
    dn: Buffer
    """[M,N]: dq~; dk likewise dk~."""
    dk: Buffer
    g: Buffer
    """bf16 [M,P]; gw, dgate likewise."""
    gw: Buffer
    dgate: Buffer


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over the columns of a row, over a chunk's pairs of rows, or over the whole walk."""

    row_s: Buffer
    """fp32 [2 + 2 * groups, M]: 0 the gradient of gamma, 1 the same token's share, then <g, y> and <x, dx> by group."""
    row: Buffer
    part_row: Buffer
    line_s: Buffer
    """fp32 [2 * groups, N]: the edge, see `make_edge`."""
    line: Buffer
    part_line: Buffer
    same_s: Buffer
    """fp32 [M,R]: the scores of a token with itself; dsame_s: their gradients."""
    dsame_s: Buffer
    d_row: Buffer
    """fp32 [M]: partial sums of the gradient of D."""
    psi_acc: Buffer
    """fp32 [rows,P]: partial sums of the gradient of psi; zeta_acc, phi_acc likewise."""
    zeta_acc: Buffer
    phi_acc: Buffer
    q_bias: Buffer
    """fp32 [R,N]: the gradient of the bias; k_bias likewise."""
    k_bias: Buffer


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The thread's angles."""

    cos: Buffer
    """fp16 [angles]; sin likewise."""
    sin: Buffer
    turn: Buffer
    """fp32 [angles]: gradients of the angles; turn_s [M,A+4]: those of all threads."""
    turn_s: Buffer
