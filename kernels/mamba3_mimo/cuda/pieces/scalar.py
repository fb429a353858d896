"""Formulas of the kernels, one element at a time, each stated once.

The functions take and return scalars of a program, float32 unless stated otherwise. Forms of a kernel differ in the
elements that a thread holds, but share these formulas. docs/kernels.md derives them. Only F0 has formulas of its own,
for whole super-chunks. Letters: see shape.py.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import tilelang.language as T  # noqa: N812 - the language's own name
from tilelang.language.eager.builder import Builder

Expr: TypeAlias = Any
"""A scalar expression of TileLang, or a number."""

LOG2E = math.log2(math.e)
TAU = 2 * math.pi


class RotaryPair(NamedTuple):
    """Elements j and N/2 + j of a row, which one angle turns."""

    lo: Expr
    hi: Expr


def turned(lo: Expr, hi: Expr, cos: Expr, sin: Expr) -> RotaryPair:
    """Return the pair turned by its angle: q~ or k~ from q or k plus bias."""
    return RotaryPair(lo * cos - hi * sin, lo * sin + hi * cos)


def turned_back(lo: Expr, hi: Expr, cos: Expr, sin: Expr) -> RotaryPair:
    """Return the pair turned back: the gradient of q or k from the gradient of q~ or k~."""
    return RotaryPair(lo * cos + hi * sin, hi * cos - lo * sin)


def moment(grad: RotaryPair, tile: RotaryPair) -> Expr:
    """Return the gradient of an angle from its pair `tile` of q~ or k~ and the pair's gradient."""
    return grad.hi * tile.lo - grad.lo * tile.hi


def pair_weight(t: Expr, u: Expr, lc_t: Expr, lc_u: Expr, sk_u: Expr, gm_t: Expr) -> Expr:
    """Return W(t, u), the weight of the write of token u in the output of token t of the same chunk.

    lc is the decay summed from the chunk's start, in log2. Above the diagonal the difference is positive, and the
    minimum prevents an overflow.
    """
    decay = _named("decay", T.exp2(T.min(lc_t - lc_u, 0.0)) * sk_u)
    return T.if_then_else(t > u, decay, T.if_then_else(t == u, gm_t, 0.0))


def read_scale(lc_t: Expr) -> Expr:
    """Return the weight of the chunk's entering state in the output of token t."""
    return T.exp2(lc_t)


def write_scale(lc_last: Expr, lc_u: Expr, sk_u: Expr) -> Expr:
    """Return the weight of the write of token u in the chunk's leaving state."""
    return T.exp2(lc_last - lc_u) * sk_u


def weighted(score: Expr, weight: Expr, own: Expr, skip: Expr) -> Expr:
    """Return the weighted score of two rows. A row with itself (`own`) also gets `skip`, the D of its head."""
    return score * weight + skipped(own, skip)


def skipped(own: Expr, skip: Expr) -> Expr:
    """Return D's addition to the weighted score of two rows."""
    return T.if_then_else(own, skip, 0.0)


def psiv(v: Expr, psi: Expr) -> Expr:
    """Return x = PsiV of one rank. Also computes that rank's part of the gradient of v from the gradient of x."""
    return v * psi


def bent(half_u: Expr) -> Expr:
    """Return the tangent tanh(u / 2), a hardware function that states the output gate and its gradient."""
    return T.tanh(half_u)


def silu(half_u: Expr, bent_u: Expr) -> Expr:
    """Return the output gate u sigmoid(u), with sigmoid(u) = (1 + tanh(u / 2)) / 2."""
    return half_u * bent_u + half_u


class GatedGradient(NamedTuple):
    """A gradient d behind the output gate."""

    silu: Expr
    """d silu(u)."""
    double_slope: Expr
    """2 d silu'(u)."""


def gated_gradient(d: Expr, half_u: Expr, bent_u: Expr) -> GatedGradient:
    """Return d times the output gate, and d times the gate's doubled slope silu'(u) = s + silu(u) (1 - s).

    s = sigmoid(u). In this order both take four instructions.
    """
    double_sigmoid = d * bent_u + d
    gated = double_sigmoid * half_u
    return GatedGradient(gated, gated * (1.0 - bent_u) + double_sigmoid)


def through_gate(d: Expr, y: Expr, half_u: Expr, bent_u: Expr, *, wide: bool) -> tuple[Expr, Expr]:
    """Return d silu(u) and d y silu'(u). In `wide` tiles it takes two instructions more, because the others spill."""
    if wide:
        gate = silu(half_u, bent_u)
        return d * gate, d * y * (gate * (0.5 - 0.5 * bent_u) + (0.5 + 0.5 * bent_u))
    gated = gated_gradient(d, half_u, bent_u)
    return gated.silu, 0.5 * gated.double_slope * y


def tanh(x: Expr) -> Expr:
    """Return the hyperbolic tangent with an absolute error near 1e-7, because angles add up over the sequence."""
    return 1.0 - 2.0 / (1.0 + T.exp2(x * (2 * LOG2E)))


def wrapped(angle: Expr) -> Expr:
    """Return the angle reduced to [-pi, pi]."""
    return angle - T.floor(angle * (1 / TAU) + 0.5) * TAU


def d_trap(mix: Expr, dt: Expr, d_gamma: Expr, d_look: Expr) -> Expr:
    """Return the gradient of trap from those of gamma = mix dt and look = (1 - mix) dt, with mix = sigmoid(trap)."""
    return mix * (1.0 - mix) * dt * (d_gamma - d_look)


def d_dt(mix: Expr, d_gamma: Expr, d_look: Expr) -> Expr:
    """Return the gradient of dt without the angles' share, from those of gamma and look."""
    return mix * d_gamma + (1.0 - mix) * d_look


def d_angle(d_step: Expr, dt: Expr, bent_angle: Expr) -> Expr:
    """Return the gradient of a raw angle from `d_step`, pi times the gradient of its step pi tanh(angle) dt."""
    return d_step * dt * (1.0 - bent_angle * bent_angle)


def _named(name: str, value: Expr) -> Expr:
    """Return a name for `value` in the current program, so that it is computed once and at this position."""
    builder = Builder.current()
    return value if builder is None else builder.bind_immutable(name, value)
