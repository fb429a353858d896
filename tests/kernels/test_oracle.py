"""The oracle's adjoint is checked against central differences of its own forward pass."""

import numpy as np
import pytest
import torch

from tests.kernels.oracle import NAMES, Oracle
from tests.scan_inputs import ScanSizes, random_inputs

IDS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 6, 6, 6, 6, 6, 6, 6, 9]])


def _values(seed: int):
    shape = ScanSizes(batch=2, length=9, heads=4, groups=2, state=8, width=3, ranks=2)
    inputs = random_inputs(shape, seed=seed)
    return {name: tensor.double().numpy() for name, tensor in zip(NAMES, inputs.tensors(), strict=True)}


@pytest.mark.parametrize("cumulated", [False, True], ids=["raw_angles", "cumulated_angles"])
@pytest.mark.parametrize("states", [False, True], ids=["output", "output_and_states"])
def test_gradients_match_central_differences(cumulated, states):
    values, rng = _values(3), np.random.default_rng(0)
    values["dt"][:, :, 1::3] = values["dt"][:, :, 2::3] = 0.0  # the adjoint does not divide by a step
    weight, weight_final, before = rng.normal(size=values["v"].shape), None, None
    varied = dict(values)
    if states:
        weight_final, state, write = rng.normal(size=(3, 2, 4, 8, 3))
        before = {"state": state, "write": write, "goes_on": np.array([True, False])}
        varied |= {"state": state, "write": write}
    analytic = Oracle(values, IDS, cumulated, before).gradients(weight, weight_final)
    assert set(analytic) == set(varied)

    def value():
        oracle = Oracle(values, IDS, cumulated, before)
        return (oracle.out * weight).sum() + (0 if weight_final is None else (oracle.final_state * weight_final).sum())

    step = 1e-6
    for name in varied:
        flat = varied[name].reshape(-1)
        for at in rng.choice(flat.size, min(8, flat.size), replace=False):
            kept = flat[at]
            flat[at] = kept + step
            above = value()
            flat[at] = kept - step
            below = value()
            flat[at] = kept
            difference = (above - below) / (2 * step)
            scale = np.abs(analytic[name]).max()
            assert abs(difference - analytic[name].reshape(-1)[at]) < 1e-7 * scale + 1e-8, name


def test_documents_of_a_row_equal_separate_rows():
    values = _values(4)
    together = Oracle(values, IDS).out[0]
    for start, stop in ((0, 3), (3, 7), (7, 9)):
        alone = {}
        for name, value in values.items():
            if name in ("adt", "dt", "trap"):
                value = value[:1, :, start:stop]
            elif name in ("q", "k", "v", "z", "angles"):
                value = value[:1, start:stop]
            alone[name] = value
        np.testing.assert_allclose(Oracle(alone).out[0], together[start:stop], rtol=1e-12, atol=1e-12)


def test_step_one_equals_hand_computation():
    shape = ScanSizes(batch=1, length=1, heads=1, groups=1, state=4, width=1, ranks=1)
    i = random_inputs(shape, seed=5)
    values = {name: tensor.double().numpy() for name, tensor in zip(NAMES, i.tensors(), strict=True)}
    x = i.v.item() * i.psi.item()
    dot = float(torch.dot((i.q + i.q_bias).flatten(), (i.k + i.k_bias).flatten()))
    gamma = torch.sigmoid(i.trap).item() * i.dt.item()
    gate = i.z.item() * i.zeta.item()
    expected = (gamma * dot * x + i.D.item() * x) * gate / (1 + np.exp(-gate)) * i.phi.item()
    assert Oracle(values).out.item() == pytest.approx(expected, rel=1e-5)
