"""Layout of the lifted form of B3 (lifted.py): tiles in shared memory, registers, operands. Letters: see shape.py."""

# ruff: noqa: N812

from dataclasses import dataclass
from typing import Any, NamedTuple

import tilelang.language as T

from ablate.kernels.mamba3_mimo.cuda.backward.groups import Buffer
from ablate.kernels.mamba3_mimo.cuda.pieces import tiles
from ablate.kernels.mamba3_mimo.cuda.pieces.loads import Loads
from ablate.kernels.mamba3_mimo.cuda.pieces.matrices import swizzled_lines
from ablate.kernels.mamba3_mimo.cuda.pieces.tiles import BF16, F16, F32
from ablate.kernels.mamba3_mimo.cuda.shape import GROUP, LINE, SWIZZLE_128, ScanShape, Variant

OF_A_PROCESSOR = 228 * 1024
"""Bytes of shared memory of all blocks on a processor."""
BESIDES = 3680
"""Most bytes of a block besides its tiles: barriers, alignment, parts for the compiler and the driver."""


def groups_of(s: ScanShape) -> int:
    """Return the warp groups of a block. Each has 64 states and, of all ranks, its turn of the blocks of 8 tokens."""
    return s.N // 64


def lifts(s: ScanShape, v: Variant) -> bool:
    """Return whether B3 has this form: tiles of 64 rows and columns, and no switch that loads x or merges buffers.

    At state size 64 two blocks must fit on a processor, because a single one would wait for itself.
    """
    groups = groups_of(s)
    square = s.M == s.P == 64 and s.N in {64, 128} and 8 * groups <= s.C <= 32
    plain = not (v.psiv_cache or v.aggressive_smem_merge)
    return square and plain and (shared_bytes(s, v) + BESIDES) * (2 // groups) <= OF_A_PROCESSOR


def refusals(v: Variant, s: ScanShape) -> tuple[tuple[bool, str], ...]:
    """Return the limits of switches that only this form supports."""
    sizes = f"state size {s.N}, head width {s.P} and {s.M} rows in a chunk of {s.C} tokens"
    return (
        (
            v.warp_specialize and not v.tma,
            "warp_specialize with tma off: a warp group of its own issues bulk copies only",
        ),
        (
            v.warp_specialize and v.pipeline_stages == 0,
            "warp_specialize with pipeline_stages 0: the warp group that copies runs at least one chunk ahead",
        ),
        (
            v.warp_specialize and not lifts(s, v),
            f"warp_specialize with {sizes}, psiv_cache {v.psiv_cache}, aggressive_smem_merge {v.aggressive_smem_merge} "
            f"and pipeline_stages {v.pipeline_stages}; allowed: sizes of the lifted form of the walk, state size 64 "
            "or 128, head width 64, 64 rows, no cache, no merge, one stage",
        ),
        (
            s.in_turn > 1 and not lifts(s, v),
            f"heads_in_turn is {s.in_turn} with {sizes} or with these switches; allowed: 0, 1, because only the lifted "
            "form of the walk adds up heads",
        ),
        (
            s.heads_per_group % s.in_turn > 0,
            f"heads_in_turn is {s.in_turn} with {s.heads_per_group} heads in a group; allowed: a divisor of that",
        ),
    )


def ranks_together(s: ScanShape) -> bool:
    """Return whether the ranks of q and of k are the 8 columns of one product."""
    return 2 * s.R <= 8


def shared_bytes(s: ScanShape, v: Variant) -> int:
    """Return the bytes of shared memory of a block."""
    C, M, N, P, R, A, two = s.C, s.M, s.N, s.P, s.R, s.A, s.N > 64
    slots, held = max(1, v.pipeline_stages), v.pipeline_stages + 1
    halves = (2 * slots + 2 + 2 * two) * M * N + (slots + 1) * N * P + (4 + 2 * two) * 64 * 64
    halves += C * P * (held + slots * s.gated) + slots * (C if s.reduced else M) * P + held * A * C * 2 + 2 * R * N
    words = M * (A + 8) + 3 * held * C + 2 * M + 8 * C + 8 * N + 8 + P * R * (1 + 2 * s.gated + s.reduced)
    return 2 * halves + 4 * words


class Operand(NamedTuple):
    """A tile in shared memory as an operand of the matrix unit."""

    desc: Any
    """Descriptor of the tile, with all blocks of 8 rows in order, or every `groups`th block."""
    deep: bool
    """Whether the summed axis is the columns of the tile."""
    offset: Any = 0
    """Bytes / 16 from the tile's start."""
    spread: int = 1
    """If the summed axis is rows: the distance of consecutive blocks of 8. The blocks between them come afterwards."""

    def moved(self, distance: Any) -> "Operand":
        """Return the operand at `distance` behind this one."""
        return self._replace(offset=self.offset + distance)

    def at(self, step: Any) -> Any:
        """Return the offset of the 16 numbers of step `step` along the summed axis."""
        panel, within = step // 4, step % 4
        at = panel * 64 * LINE + within * 32 if self.deep else (within * 16 * self.spread + panel * 8) * LINE
        return (at >> 4) + self.offset


def panel_column(s: ScanShape, group: Any) -> Any:
    """Return the column of 8 states of the lower half in q~ and k~. Their rotary partners lie 32 columns behind."""
    groups = groups_of(s)
    return group * 8 if groups == 1 else group % groups * 64 + group // groups * 8


class ColumnSplit(NamedTuple):
    """A thread's share of the columns of a tile [64,64], which are tokens of all ranks, in blocks of 8."""

    groups: int
    """Warp groups, which take the blocks in turn."""
    blocks: int
    """Blocks of a thread."""
    parts: int
    """Blocks of one rank."""
    angles: int
    """Blocks of 8 angles of a thread, that is of pairs of states."""


def split_of(s: ScanShape) -> ColumnSplit:
    """Return a thread's share of the columns."""
    groups = groups_of(s)
    return ColumnSplit(groups, 8 // groups, s.C // 8 // groups, s.A // 8 // groups)


@dataclass(frozen=True, kw_only=True)
class WalkTiles:
    """Shared memory. Tiles are bf16 [64,64] unless stated otherwise."""

    q_raw: Buffer
    """Loaded q, a slot for every chunk in flight; k_raw likewise."""
    k_raw: Buffer
    q_s: Buffer
    """[M,N]: q~, in the columns of `panel_column`; k_s likewise k~."""
    k_s: Buffer
    x_s: Buffer
    """[M,P]: x."""
    g_s: Buffer
    """[P,M]: g; gw_s is g times the decay from the chunk's start, with one group in the memory of k_raw, None if that
    is a plain tile."""
    gw_s: Buffer
    e_s: Buffer
    """[P,N]: E, in the columns of `panel_column`."""
    mix_s: Buffer
    """[M,M]: the weighted scores, in the end the output of `make_ranks`; mixt_s, with two groups, their transpose;
    dmix_s their weighted gradients."""
    mixt_s: Buffer
    dmix_s: Buffer
    h_s: Buffer
    """[N,P] per slot: the entering state."""
    dq_s: Buffer
    """[M,N]: the gradient of q for one head; dk_s likewise. With one group in the memory of g and x."""
    dk_s: Buffer
    v_s: Buffer
    """[C,P] per held slot, in the end the gradient of v."""
    z_s: Buffer
    """[C,P] per slot, in the end the gradient of z."""
    do_s: Buffer
    """[C,P] per slot, or [M,P] without phi."""
    cs_s: Buffer
    """fp16 [A/4,C,8] per held slot."""
    scalar_s: Buffer
    """fp32 [3,C] per held slot: lc, sk, gm."""
    turn_s: Buffer
    """fp32 [M,A+8]: gradients of angles."""
    row_s: Buffer
    """fp32 [2,M]: the gradient of gamma, the same token's share."""
    sum_s: Buffer
    """fp32 [4,2,C]: <g, y> and <x, dx> by warp."""
    line_s: Buffer
    """fp32 [4,2,N]: an edge by warp."""
    total_s: Buffer
    """fp32 [warps]: the gradient of D."""
    q_bias_s: Buffer
    """bf16 [1,R,N]; k_bias_s likewise."""
    k_bias_s: Buffer
    psi_s: Buffer
    """fp32 [P,R]; half_zeta_s is zeta / 2, zeta_s zeta phi / 2, phi_s phi."""
    half_zeta_s: Buffer
    zeta_s: Buffer
    phi_s: Buffer
    bar: Buffer
    """Barriers of the copies."""


def annotate_tiles(at: WalkTiles, loads: Loads) -> None:
    """Annotate the layouts of tiles for the matrix unit and bulk copies."""
    swizzled = [at.q_s, at.k_s, at.x_s, at.g_s, at.e_s, at.mix_s, at.dmix_s, at.h_s, at.v_s, at.z_s, at.do_s]
    swizzled += [] if at.mixt_s is None else [at.gw_s, at.mixt_s, at.dq_s, at.dk_s]
    swizzled += [at.q_raw, at.k_raw] if loads.two_d else []
    T.annotate_layout({tile: swizzled_lines(tile) for tile in swizzled})


@dataclass(frozen=True, kw_only=True)
class WalkRegisters:
    """Registers of a thread, fp32 unless stated otherwise."""

    E: Buffer
    """[32] of E^T [P,N]; dn [32] and dk [32] of the gradients of q~ and k~ [M,N]."""
    dn: Buffer
    dk: Buffer
    y: Buffer
    """Parts of y^T, dx^T [P,M] and of scores [M,M]: 32 numbers, or 16 with two groups. With one group score is dk."""
    dx: Buffer
    score: Buffer
    wide: Buffer
    """bf16 [32]: rounded E, dn and dk; left, g and gw: rounded scores and g^T."""
    left: Buffer
    g: Buffer
    gw: Buffer
    v: Buffer
    """bf16: the thread's two columns of its tokens; z likewise, do likewise or for all rows; out: gradients."""
    z: Buffer
    do: Buffer
    out: Buffer
    ranks: Buffer
    """Sums over ranks of the gradient of z, then of v."""
    w: Buffer
    """Weights of pairs of tokens; scale: numbers of the thread's columns."""
    scale: Buffer
    rows: Buffer
    """<g, y> and <x, dx> of the thread's tokens."""
    turn: Buffer
    """Gradients of the thread's angles."""
    own: Buffer
    """Scores of the rows' tokens with themselves; d_own: their gradients."""
    d_own: Buffer
    ends: Buffer
    """[2]: temporary numbers."""
    psi: Buffer
    """[2 R]: sums over the walk of the gradient of psi; zeta, phi likewise."""
    zeta: Buffer
    phi: Buffer
    d: Buffer
    """[1]: the gradient of D; skip: D."""
    skip: Buffer
    q_bias: Buffer
    """[4] of [N,8]: sums over the walk of the gradients of q's bias by rank. If k's fit behind them, k_bias is the same
    buffer."""
    k_bias: Buffer
    cos: Buffer
    """fp16: cosines of the row that the thread turns; sin likewise."""
    sin: Buffer


def make_registers(s: ScanShape) -> WalkRegisters:
    """Allocate the registers of a thread."""
    R, (groups, blocks, parts, angles) = s.R, split_of(s)
    turning = tiles.spread(s, groups * GROUP).angles

    def fp32(size: int) -> Buffer:
        return T.alloc_local((size,), F32)

    def narrow(size: int) -> Buffer:
        return T.alloc_local((size,), BF16)

    dk, q_bias = fp32(32), fp32(4)
    return WalkRegisters(
        E=fp32(32), dn=fp32(32), dk=dk, y=fp32(blocks * 4), dx=fp32(blocks * 4),
        score=dk if groups == 1 else fp32(blocks * 4), wide=narrow(32), left=narrow(blocks * 4), g=narrow(blocks * 4),
        gw=narrow(blocks * 4), v=narrow(parts * 4), z=narrow(parts * 4),
        do=narrow(parts * 4 if s.reduced else blocks * 4), out=narrow(parts * 4), ranks=fp32(parts * 4),
        w=fp32(parts * 4), scale=fp32(parts * 2), rows=fp32(parts * 4), turn=fp32(angles * 4),
        own=fp32(2 // groups * R), d_own=fp32(2 // groups * R), ends=fp32(2), psi=fp32(2 * R), zeta=fp32(2 * R),
        phi=fp32(2 * R), d=fp32(1), skip=fp32(1), q_bias=q_bias,
        k_bias=q_bias if ranks_together(s) else fp32(4),
        cos=T.alloc_local((turning,), F16), sin=T.alloc_local((turning,), F16),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WalkOperands:
    """Tiles as operands of the matrix unit. With two groups a right operand is the part of the thread's group."""

    q: Operand
    """Whole tile, a left operand; x, xt (transposed), g, gt, gw, gwt, e, dmix, dmixt, h (entering state) likewise.
    Without gw_s, gw and gwt have no descriptor."""
    x: Operand
    xt: Operand
    g: Operand
    gt: Operand
    gw: Operand
    gwt: Operand
    e: Operand
    dmix: Operand
    dmixt: Operand
    h: Operand
    q_rows: Operand
    """The group's rows (tokens), as columns of the product; k_rows, x_rows, mix_rows, mixt_rows likewise."""
    k_rows: Operand
    x_rows: Operand
    mix_rows: Operand
    mixt_rows: Operand
    q_states: Operand
    """The group's columns (states) of q~; k_states, e_states likewise; h_states: rows of the entering state."""
    k_states: Operand
    e_states: Operand
    h_states: Operand
    dq_states: Operand
    """The group's states of the gradients of q, as rows of the product; dk_states likewise."""
    dk_states: Operand
    q_ranks: Operand
    """Ranks of a tile's rows, as columns of the product; k_ranks likewise."""
    k_ranks: Operand


def make_operands(s: ScanShape, at: WalkTiles, group: Any) -> WalkOperands:
    """Create the descriptors of warp group `group`, once per walk."""
    groups = groups_of(s)
    mine, panel = group * (8 * LINE >> 4), group * (64 * LINE >> 4)

    def described(tile: Buffer, apart: int = 1) -> Any:
        desc = T.alloc_wgmma_desc()
        T.initialize_wgmma_descriptor(desc, tile.access_ptr("r"), SWIZZLE_128, 1, 8 * apart * LINE >> 4)
        return desc

    q, k, x, g, e, mix, dmix = map(described, (at.q_s, at.k_s, at.x_s, at.g_s, at.e_s, at.mix_s, at.dmix_s))
    dq, dk = (g, x) if groups == 1 else (described(at.dq_s), described(at.dk_s))
    gw = None if at.gw_s is None else described(at.gw_s)
    spread = (at.q_s, at.k_s, at.x_s, at.mix_s, at.h_s)
    q_o, k_o, x_o, mix_o, h_o = (
        (q, k, x, mix, described(at.h_s)) if groups == 1 else [described(tile, groups) for tile in spread]
    )
    return WalkOperands(
        q=Operand(q, True), x=Operand(x, True), xt=Operand(x, False), g=Operand(g, True), gt=Operand(g, False),
        gw=Operand(gw, True), gwt=Operand(gw, False), e=Operand(e, True), dmix=Operand(dmix, True),
        dmixt=Operand(dmix, False), h=Operand(h_o, False, spread=groups),
        q_rows=Operand(q_o, True, mine), k_rows=Operand(k_o, True, mine), x_rows=Operand(x_o, True, mine),
        mix_rows=Operand(mix_o, True, mine),
        mixt_rows=Operand(mix, False) if groups == 1 else Operand(described(at.mixt_s, groups), True, mine),
        q_states=Operand(q, False, panel), k_states=Operand(k, False, panel), e_states=Operand(e, False, panel),
        h_states=Operand(h_o, True, mine), dq_states=Operand(dq, False, panel), dk_states=Operand(dk, False, panel),
        q_ranks=Operand(mix, True), k_ranks=Operand(mix, True, ranks_together(s) * (8 * LINE >> 4)),
    )  # fmt: skip
