"""The sliced float64 reference against the whole problem at once, and errors row by row against a plain definition."""

import pytest
import torch

from kernels.mamba3_mimo import ScanInputs, criterion
from kernels.mamba3_mimo.operands import psiv
from kernels.mamba3_mimo.problem import Case, make_grad, make_inputs, outputs
from kernels.mamba3_mimo.reference import chunk_parallel
from tests.kernels.accuracy import compare, compare_rows
from tests.kernels.exact import SLICE_SIZE, reference, yardstick

CASES = {
    "plain": Case(B=3, S=40, H=4, N=16, P=32, R=2),
    "groups": Case(B=2, S=24, H=6, G=3, N=16, P=32, R=1),
    "a group per head": Case(B=2, S=24, H=3, G=3, N=16, P=32, R=2),
    "documents": Case(B=2, S=50, H=2, N=16, P=32, R=2, documents=4),
    "one angle set": Case(B=2, S=20, H=4, N=16, P=32, R=2, shared_angles=True),
    "one head, one angle set": Case(B=2, S=20, H=1, N=16, P=32, R=2, shared_angles=True),
    "cumulated": Case(B=2, S=20, H=4, N=16, P=32, R=2, cumulated=True),
    "per rank": Case(B=2, S=20, H=4, N=16, P=32, R=2, without=("phi",)),
    "bare": Case(B=2, S=20, H=4, N=16, P=32, R=2, without=("z", "zeta", "phi", "D")),
}


def whole(inputs: ScanInputs, grad_out: torch.Tensor) -> dict[str, torch.Tensor]:
    """The definition: everything at once, in float64."""
    wide = inputs.with_tensors(tuple(t.double() for t in inputs.tensors()))
    return outputs(lambda i: chunk_parallel(i, psiv(i.v, i.psi), chunk_size=16), wide, grad_out.double())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_slices_add_up_to_the_whole(case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    grad_out = make_grad(inputs, 1)
    per_head = case.S * case.R * max(case.N, case.P)
    want = whole(inputs, grad_out)
    for size in (0, 2 * per_head, 3 * per_head, case.H * per_head, 2 * case.H * per_head, 99 * case.H * per_head):
        found = reference(inputs, grad_out, slice_size=size)
        assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in want.items()}
        assert max((found[name] - want[name]).abs().max().item() for name in want) < 1e-10


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_yardsticks_of_slices_add_up_to_that_of_the_whole(case: Case) -> None:
    """The exact results equal; the noise, of which every slice draws its own, within what few draws leave."""
    inputs = make_inputs(case, "cpu")
    grad_out, per_head = make_grad(inputs, 1), case.S * case.R * max(case.N, case.P)
    exact, noise, carried = criterion.yardstick(inputs, grad_out, samples=8)
    for size in (0, 2 * case.H * per_head):
        found, moved, moved_sums = yardstick(inputs, grad_out, samples=8, slice_size=size)
        assert max((found[name] - exact[name]).abs().max().item() for name in exact) < 1e-10
        assert {name: t.shape for name, t in moved.items()} == {name: t.shape for name, t in noise.items()}
        for name, squares in noise.items():
            assert 0.25 < moved[name].sum() / squares.sum() < 4, name
        assert 0.25 < moved_sums["adt"].sum() / carried["adt"].sum() < 4
        assert moved_sums["adt"].shape == carried["adt"].shape == noise["adt"].shape


def test_the_timed_problems_are_taken_in_slices_of_one_row_or_fewer_heads() -> None:
    assert 8192 * 16 * 4 * 64 == SLICE_SIZE == 2048 * 32 * 4 * 128


def test_errors_of_rows_are_those_of_the_worst_row() -> None:
    want = {"out": torch.ones(2, 4, 1, 2).double(), "D": torch.ones(3).double()}
    got = {name: tensor.clone() for name, tensor in want.items()}
    want["out"][1] *= 100
    got["out"][1] *= 100
    got["out"][0, 2] += 0.5
    got["D"][0] = 1.25
    assert compare(got, want)["out"] == (0.005, pytest.approx(0.005, rel=1e-3))
    assert compare_rows(got, want) == {"out": (0.5, 0.5), "D": (0.25, 0.0)}
    got["out"][0, 0] = float("nan")
    overall, row = compare_rows(got, want)["out"]
    assert not overall < 1
    assert not row < 1
