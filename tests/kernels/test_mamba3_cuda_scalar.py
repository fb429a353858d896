"""The formulas of the kernels, in float64: the expressions that they put into programs, evaluated with numbers."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("tilelang")

from tvm.tirx import Var

from ablate.kernels.mamba3_mimo.cuda.pieces import scalar
from ablate.kernels.mamba3_mimo.cuda.pieces.scalar import RotaryPair
from tests.kernels.oracle import NAMES, Oracle
from tests.kernels.tile_interpreter import MATH

T = SimpleNamespace(
    **{name: MATH[name] for name in ("exp2", "tanh", "floor", "min")}, float32=float, if_then_else=np.where
)
TOKENS = 7


def value(formula, *numbers):
    """Return what the expression of `formula` is for these numbers; a tuple of its kind for a tuple."""
    names = list(inspect.signature(formula).parameters)
    made = formula(*(Var(name, "float32") for name in names))
    values = [eval(str(part), {"T": T, **dict(zip(names, numbers, strict=True))}) for part in np.atleast_1d(made)]  # noqa: S307
    return type(made)(*values) if isinstance(made, tuple) else values[0]


def slope(formula, at, step=1e-6):
    """Return the derivative of a function of one number."""
    return (formula(at + step) - formula(at - step)) / (2 * step)


@pytest.fixture
def random():
    return np.random.default_rng(7)


def as_complex(pair):
    return pair.lo + 1j * pair.hi


def test_a_pair_is_turned_like_a_complex_number_and_back(random):
    pair, theta = RotaryPair(*random.normal(size=2)), random.uniform(-3, 3)
    turned = value(scalar.turned, *pair, np.cos(theta), np.sin(theta))
    assert as_complex(turned) == pytest.approx(as_complex(pair) * np.exp(1j * theta))
    assert as_complex(value(scalar.turned_back, *turned, np.cos(theta), np.sin(theta))) == pytest.approx(
        as_complex(pair)
    )


def test_the_moment_is_the_gradient_of_the_angle(random):
    pair, grad, theta = RotaryPair(*random.normal(size=2)), RotaryPair(*random.normal(size=2)), random.uniform(-3, 3)

    def turned(angle):
        return value(scalar.turned, *pair, np.cos(angle), np.sin(angle))

    moment = value(lambda a, b, c, d: scalar.moment(RotaryPair(a, b), RotaryPair(c, d)), *grad, *turned(theta))
    assert moment == pytest.approx(slope(lambda angle: np.dot(grad, turned(angle)), theta))


def test_a_chunk_of_weights_and_scales_is_the_recurrence(random):
    q = k = (1, TOKENS, 1, 1, 2)
    v = z = angles = (1, TOKENS, 1, 1)
    adt = dt = trap = (1, 1, TOKENS)
    sizes = (q, k, v, z, (1, 1, 2), (1, 1, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1,), adt, dt, trap, angles)
    values = {name: random.normal(size=size) for name, size in zip(NAMES, sizes, strict=True)}
    values |= {"adt": -np.abs(values["adt"]), "dt": np.abs(values["dt"])}
    oracle = Oracle(values)
    q, k, x = (getattr(oracle, name)[0, 0, :, 0] for name in ("q", "k", "x"))
    gamma, look = oracle.gamma[0, 0], (1 - oracle.mix[0, 0]) * values["dt"][0, 0]
    sk = gamma + np.append(look[1:], 0.0)
    cut = 3  # the tokens before are one chunk, the others the next
    before, lc = (np.cumsum(part) * scalar.LOG2E for part in np.split(values["adt"][0, 0], [cut]))
    enters = sum(value(scalar.write_scale, before[-1], before[u], sk[u]) * np.outer(k[u], x[u]) for u in range(cut))
    leaves = value(scalar.read_scale, lc[-1]) * enters
    for t in range(TOKENS - cut):
        y = value(scalar.read_scale, lc[t]) * q[cut + t] @ enters
        for u in range(TOKENS - cut):
            weight = value(scalar.pair_weight, t, u, lc[t], lc[u], sk[cut + u], gamma[cut + t])
            y += value(mixed, t, u, q[cut + t] @ k[cut + u], weight, values["D"][0]) * x[cut + u]
        assert y == pytest.approx(oracle.y[0, 0, cut + t, 0])
        leaves = leaves + value(scalar.write_scale, lc[-1], lc[t], sk[cut + t]) * np.outer(k[cut + t], x[cut + t])
    assert leaves == pytest.approx(oracle.states[0, 0, -1])


def mixed(t, u, score, weight, skip):
    return scalar.weighted(score, weight, t == u, skip)


def test_above_the_diagonal_a_weight_is_zero_and_does_not_overflow():
    assert value(scalar.pair_weight, 0, 1, 0.0, -3000.0, 1.0, 1.0) == 0.0


@pytest.mark.parametrize("u", [-9.0, -1.3, 0.0, 0.4, 6.0])
def test_the_gate_and_its_slope(u):
    def gate(at):
        return at / (1 + np.exp(-at))

    bent = value(scalar.bent, u / 2)
    assert value(scalar.silu, u / 2, bent) == pytest.approx(gate(u), abs=1e-12)
    gated, double_slope = value(scalar.gated_gradient, 1.7, u / 2, bent)
    assert gated == pytest.approx(1.7 * gate(u), abs=1e-12)
    assert double_slope == pytest.approx(2 * 1.7 * slope(gate, u), abs=1e-8)


@pytest.mark.parametrize("angle", [-40.0, -3.2, 0.1, 3.0, 3.2, 700.0])
def test_a_wrapped_angle_is_the_same_angle_within_a_half_turn(angle):
    wrapped = value(scalar.wrapped, angle)
    assert abs(wrapped) <= np.pi + 1e-4
    assert np.exp(1j * wrapped) == pytest.approx(np.exp(1j * angle), abs=1e-4)


def test_gradients_of_the_time_inputs_are_those_of_gamma_look_and_the_step(random):
    trap, dt, angle, d_gamma, d_look, d_step = random.normal(size=6)

    def loss(trap, dt):
        mix = 1 / (1 + np.exp(-trap))
        return d_gamma * mix * dt + d_look * (1 - mix) * dt

    mix = 1 / (1 + np.exp(-trap))
    assert value(scalar.d_trap, mix, dt, d_gamma, d_look) == pytest.approx(slope(lambda at: loss(at, dt), trap))
    assert value(scalar.d_dt, mix, d_gamma, d_look) == pytest.approx(slope(lambda at: loss(trap, at), dt))
    bent = value(scalar.tanh, angle)
    assert bent == pytest.approx(np.tanh(angle), abs=1e-6)
    by_angle = value(scalar.d_angle, d_step, dt, bent)
    assert by_angle == pytest.approx(slope(lambda at: d_step * np.tanh(at) * dt, angle), abs=1e-6)
