import torch

from tests.scan_inputs import ScanSizes, global_error, random_inputs, worst_row_error


def test_worst_row_error_is_that_of_the_row():
    expected = torch.ones(1, 4, 2)
    actual = expected.clone()
    actual[0, 2] = 1.5
    assert abs(worst_row_error(actual, expected, time_axis=1) - 0.5) < 1e-6


def test_worst_row_error_small_row_is_measured_against_the_floor():
    expected = torch.tensor([[[1.0], [1e-9]]])
    actual = torch.tensor([[[1.0], [2e-9]]])
    assert worst_row_error(actual, expected, time_axis=1) < 1e-6
    assert worst_row_error(actual, expected, time_axis=1, floor=1e-9) > 0.9


def test_global_error_zero_for_equal():
    t = torch.randn(3, 3)
    assert global_error(t, t) == 0.0


def test_random_inputs_repeats_and_decays():
    one, two = random_inputs(ScanSizes(), seed=4), random_inputs(ScanSizes(), seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), two.tensors(), strict=True))
    assert (one.adt <= 0).all()
    assert (one.dt > 0).all()
