"""The small scan that says whether a lane works: it must be able to say no."""

from dataclasses import replace

import pytest
import torch

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo import small_run
from ablate.kernels.mamba3_mimo.small_run import small_run_problem
from ablate.kernels.mamba3_mimo.support import LANES
from tests.kernels.criterion import noise_of_rows

CPU = torch.device("cpu")


def _spoil(monkeypatch: pytest.MonkeyPatch, run) -> None:
    monkeypatch.setitem(LANES, Lane.REFERENCE, replace(LANES[Lane.REFERENCE], run=run))


def test_reference_lane_works() -> None:
    assert small_run_problem(Lane.REFERENCE, CPU) is None


def test_the_limits_are_eight_times_the_noise_of_rounding() -> None:
    inputs, grad_out = small_run.problem()
    exact, noise = noise_of_rows(inputs, grad_out, gradients=True, samples=8)
    sizes = {name: 8 * float(noise[name].sum().sqrt() / exact[name].norm()) for name in exact if name != "state"}
    limits = {name: small_run.LIMITS.get(name, small_run.LIMIT) for name in sizes}
    assert {name: size for name, size in sizes.items() if not 0.6 <= size / limits[name] <= 1.1} == {}


def test_a_wrong_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LANES[Lane.REFERENCE].run

    def wrong(inputs, switches, final):
        out, state = right(inputs, switches, final)
        return out * 1.05, state

    _spoil(monkeypatch, wrong)
    assert str(small_run_problem(Lane.REFERENCE, CPU)).startswith("wrong: out")


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LANES[Lane.REFERENCE].run

    def wrong(inputs, switches, final):
        out, state = right(replace(inputs, D=inputs.D.detach()), switches, final)
        return out + 0.0 * inputs.D.sum(), state

    _spoil(monkeypatch, wrong)
    assert small_run_problem(Lane.REFERENCE, CPU) == "wrong: D"


def test_a_refusal_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(inputs, switches, final):
        raise KernelUnsupported("no tensor memory here")

    _spoil(monkeypatch, refuses)
    assert small_run_problem(Lane.REFERENCE, CPU) == "refused: no tensor memory here"
