"""Both forms of the scan against the float64 oracle: output, final state and all gradients, every time row.

Tolerances. float64: 1e-11. float32: 2e-4, every time row by itself (found: up to 9e-5 in the angles, which differs
between vector units by a factor of two). bfloat16: operands carry 8 bits, so the error of a
row is taken relative to the largest row of the tensor, 5e-2, and over the whole tensor, 3e-2.
"""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.oracle import NAMES, Oracle
from tests.scan_inputs import TIME_AXIS, ScanSizes, global_error, random_inputs, worst_row_error

FORMS = {
    "sequential": {"schedule": "sequential"},
    "C8": {"chunk_size": 8},
    "C16": {"chunk_size": 16},
    "C32": {"chunk_size": 32},
}
BASE = ScanSizes(batch=2, length=37, heads=4, groups=2, state=16, width=8, ranks=4)
SHAPES = {
    "base_odd_length_G2": BASE,
    "length_multiple_of_C": replace(BASE, length=64),
    "length_1": replace(BASE, length=1),
    "length_2C_plus_1": replace(BASE, length=33),
    "G1": replace(BASE, groups=1),
    "G4": replace(BASE, groups=4),
    "full_rotary": replace(BASE, rope_fraction=1.0),
    "R1": replace(BASE, ranks=1),
    "R2": replace(BASE, ranks=2),
    "R8": replace(BASE, ranks=8),
    "N32_P16_S100": replace(BASE, batch=1, length=100, state=32, width=16),
}
FLOAT32_LIMIT = 2e-4


def document_ids(shape, kind):
    """Documents per row: none, several that end inside chunks, one token each around a chunk border, one per token."""
    if kind == "one_document":
        return None
    if kind == "every_token":
        return torch.arange(shape.length).repeat(shape.batch, 1)
    starts = torch.zeros(shape.batch, shape.length, dtype=torch.long)
    places = {"several": ([5, 16, 17, 30], [1, 8, 36]), "returning_id": ([9, 20], [9, 20])}[kind]
    for row in range(shape.batch):
        for at in places[row]:
            starts[row, at] = 1
    ids = starts.cumsum(1)
    return ids % 2 if kind == "returning_id" else ids


def with_zero_steps(inputs, share, generator):
    """Return `inputs` with dt exactly 0 at this share of the tokens, and half of the gates saturated."""
    zeros, extreme, open_ = (torch.rand(inputs.dt.shape, generator=generator) for _ in range(3))
    trap = torch.where(extreme < 0.5, torch.where(open_ < 0.5, 700.0, -700.0).to(inputs.trap.dtype), inputs.trap)
    return replace(inputs, dt=inputs.dt.masked_fill(zeros < share, 0), trap=trap)


def compare(shape, form, *, dtype, ids=None, cumulated=False, cache=False, zero_steps=0.0):
    """Return (actual, expected) by name: output, final state and the fourteen gradients."""
    inputs = random_inputs(shape, seed=1, dtype=dtype)
    if dtype == torch.float64:
        inputs = inputs.with_tensors(tuple(t.double() for t in inputs.tensors()))
    if zero_steps:
        inputs = with_zero_steps(inputs, zero_steps, torch.Generator().manual_seed(3))
    inputs = replace(inputs, segment_ids=ids, angles_cumulated=cumulated)
    leaves = tuple(t.requires_grad_() for t in inputs.tensors())
    result = mamba3_mimo(inputs, ScanSwitches(psiv_cache=cache, **form), return_final_state=True)
    grad_out = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    actual = dict(zip(inputs.names, torch.autograd.grad(result.out, leaves, grad_out), strict=True))
    actual |= {"out": result.out.detach(), "final_state": result.final_state.state.detach()}
    values = {name: t.detach().double().numpy() for name, t in zip(inputs.names, leaves, strict=True)}
    oracle = Oracle(values, None if ids is None else ids.numpy(), cumulated)
    expected = {"out": oracle.out, "final_state": oracle.final_state} | oracle.gradients(grad_out.double().numpy())
    return actual, {name: torch.from_numpy(value) for name, value in expected.items()}


def assert_rows_close(actual, expected, tolerance):
    assert set(actual) == set(expected)
    for name, value in actual.items():
        assert value.isfinite().all(), name
        assert value.shape == expected[name].shape, name
        if float(expected[name].abs().max()) < 1e-12:  # decay and angle of a token that nothing precedes
            assert float(value.abs().max()) < tolerance, name
            continue
        assert global_error(value, expected[name]) < tolerance, name
        if name in TIME_AXIS:
            assert worst_row_error(value, expected[name], time_axis=TIME_AXIS[name]) < tolerance, name


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float32_matches_oracle(shape, form):
    assert_rows_close(*compare(shape, form, dtype=torch.float32), FLOAT32_LIMIT)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", ["several", "returning_id", "every_token"])
def test_documents_float32_match_oracle(kind, form):
    assert_rows_close(*compare(BASE, form, dtype=torch.float32, ids=document_ids(BASE, kind)), FLOAT32_LIMIT)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("cumulated", [False, True], ids=["raw_angles", "cumulated_angles"])
def test_float64_matches_oracle_to_rounding(form, cumulated):
    ids = document_ids(BASE, "several")
    assert_rows_close(*compare(BASE, form, dtype=torch.float64, ids=ids, cumulated=cumulated), 1e-11)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_steps_of_zero_and_saturated_gates_match_oracle(form, share):
    """A token that writes nothing still has gradients: those of what it would write."""
    ids = document_ids(BASE, "several")
    actual, expected = compare(BASE, form, dtype=torch.float64, ids=ids, zero_steps=share)
    assert expected["dt"].abs().min() > 0
    assert_rows_close(actual, expected, 1e-11)


@pytest.mark.parametrize("form", ["sequential", "C8", "C32"])
@pytest.mark.parametrize("name", ["q", "k", "v", "z", "adt", "dt", "trap", "angles", "entering"])
def test_a_nan_or_infinity_stays_in_its_document(form, name):
    """Draw documents and a broken number; results of all other documents are those without it."""
    rng = random.Random(f"{name} {form}")  # noqa: S311  # not for secrets
    cuts = sorted(rng.sample(range(1, 37), 3))
    starts = [0, *cuts]
    ids = sum((torch.arange(37) >= cut).long() for cut in cuts).repeat(2, 1)
    at = 0 if name == "entering" else rng.randrange(37)
    document = slice(max(s for s in starts if s <= at), min([s for s in starts if s > at], default=37))
    sane = random_inputs(BASE, seed=1)
    entering = torch.randn(2, 4, 16, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sane = sane.with_tensors(tuple(t.double() for t in sane.tensors()))
    sane = replace(sane, segment_ids=ids, entering=entering)
    broken = getattr(sane, name).clone()
    token = broken[1] if name == "entering" else broken[1].select(TIME_AXIS[name] - 1, at)
    token.view(-1)[rng.randrange(token.numel())] = rng.choice([math.nan, math.inf, -math.inf])
    grad_out = torch.randn(sane.v.shape, generator=torch.Generator().manual_seed(2)).double()
    right, right_gradients = scanned(sane, FORMS[form], grad_out)
    grad_out[1, at : document.stop] = math.nan
    result, gradients = scanned(replace(sane, **{name: broken}), FORMS[form], grad_out)
    assert result.out[1, at : document.stop].isnan().all()
    result.out[1, at : document.stop] = right.out[1, at : document.stop]
    assert global_error(result.out, right.out) < 1e-11
    state, right_state = (one.final_state.state for one in (result, right))
    last = document.stop == 37
    assert state[1].isnan().all() == last
    assert global_error(state[0] if last else state, right_state[0] if last else right_state) < 1e-11
    for time, axis in ((n, a) for n, a in TIME_AXIS.items() if n in gradients):
        gradient, expected = (one[time].movedim(axis, 1).clone() for one in (gradients, right_gradients))
        gradient[1, document] = expected[1, document]
        assert global_error(gradient, expected) < 1e-11, time


def scanned(inputs, form, grad_out):
    """Return (result, gradients by name)."""
    leaves = {n: getattr(inputs, n).detach().requires_grad_() for n in inputs.names}
    result = mamba3_mimo(replace(inputs, **leaves), ScanSwitches(**form), return_final_state=True)
    gradients = torch.autograd.grad(result.out, list(leaves.values()), grad_out)
    state = result.final_state._replace(state=result.final_state.state.detach())
    return result._replace(out=result.out.detach(), final_state=state), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("rope_fraction", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["one_document", "several"])
def test_bfloat16_matches_oracle(form, rope_fraction, kind):
    shape = replace(BASE, rope_fraction=rope_fraction)
    actual, expected = compare(shape, form, dtype=torch.bfloat16, ids=document_ids(shape, kind))
    assert actual["out"].dtype == torch.bfloat16
    assert actual["final_state"].dtype == torch.float32
    for name, value in actual.items():
        assert global_error(value, expected[name]) < 3e-2, name
        if name in TIME_AXIS:
            assert worst_row_error(value, expected[name], time_axis=TIME_AXIS[name], floor=1.0) < 5e-2, name


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_long_decay_does_not_overflow(form):
    inputs = random_inputs(BASE)
    inputs = replace(inputs, adt=inputs.adt * 200)
    leaves = tuple(t.requires_grad_() for t in inputs.tensors())
    out = mamba3_mimo(inputs, ScanSwitches(**form)).out
    grads = torch.autograd.grad(out.sum(), leaves)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", ["one_document", "several"])
def test_angles_shared_by_all_heads_equal_the_same_angles_for_each(form, kind):
    inputs = random_inputs(BASE, seed=6)
    inputs = inputs.with_tensors(tuple(t.double() for t in inputs.tensors()))
    shared = inputs.angles[:, :, :1].clone().requires_grad_()
    each = shared.detach().expand_as(inputs.angles).clone().requires_grad_()
    outs = [
        mamba3_mimo(replace(inputs, angles=angles, segment_ids=document_ids(BASE, kind)), ScanSwitches(**form)).out
        for angles in (shared, each)
    ]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(out.sum(), angles)[0] for out, angles in zip(outs, (shared, each), strict=True)]
    torch.testing.assert_close(grads[0], grads[1].sum(2, keepdim=True), rtol=1e-10, atol=1e-10)


def test_wrong_last_row_of_chunk_is_seen_by_the_row_error_alone():
    expected = torch.randn(2, 1024, 4, 8, generator=torch.Generator().manual_seed(0))
    actual = expected.clone()
    actual[0, 15] *= 1.02
    assert global_error(actual, expected) < 1e-3
    assert worst_row_error(actual, expected, time_axis=1) > 1e-2


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_gradient_is_returned_for_frozen_inputs(form):
    inputs = random_inputs(BASE)
    inputs.v.requires_grad_()
    mamba3_mimo(inputs, ScanSwitches(**form)).out.sum().backward()
    assert inputs.v.grad is not None
    assert inputs.psi.grad is None
    assert inputs.q.grad is None


UNIT_GATE = 1.2784645427610738
"""u with silu(u) = 1: a gate of this value does nothing."""


def oracle_without(inputs, missing, grad_out):
    """Return outputs and gradients without some tensors: no skip is D = 0, one rank's output a one-hot phi."""
    values = {name: getattr(inputs, name) for name in NAMES}
    values = {name: None if t is None else t.detach().double().numpy() for name, t in values.items()}
    if "D" in missing:
        values["D"] = np.zeros(BASE.heads)
    if "z" in missing:
        values["z"] = np.full(values["v"].shape, UNIT_GATE)
        values["zeta"] = np.ones(values["psi"].shape)
    if "phi" not in missing:
        oracle = Oracle(values)
        return oracle.out, oracle.gradients(grad_out.numpy())
    outs, sums = [], {}
    for rank in range(BASE.ranks):
        phi = np.zeros(values["psi"].shape)
        phi[:, rank] = 1
        oracle = Oracle(values | {"phi": phi})
        outs.append(oracle.out)
        for name, grad in oracle.gradients(grad_out[:, :, rank].numpy()).items():
            sums[name] = sums.get(name, 0) + grad
    return np.stack(outs, axis=2), sums


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("missing", [("D",), ("z", "zeta"), ("phi",), ("D", "phi"), ("z", "zeta", "phi", "D")])
def test_scan_without_skip_gate_or_contraction_matches_oracle(form, missing):
    inputs = random_inputs(BASE, seed=5)
    inputs = replace(inputs.with_tensors(tuple(t.double() for t in inputs.tensors())), **dict.fromkeys(missing))
    leaves = tuple(t.requires_grad_() for t in inputs.tensors())
    out = mamba3_mimo(inputs, ScanSwitches(**form)).out
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = dict(zip(inputs.names, torch.autograd.grad(out, leaves, grad_out), strict=True))
    expected, expected_grads = oracle_without(inputs, missing, grad_out)
    assert set(grads) == set(NAMES) - set(missing)
    torch.testing.assert_close(out.detach(), torch.from_numpy(expected), rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, torch.from_numpy(expected_grads[name]), rtol=1e-9, atol=1e-10, msg=name)
