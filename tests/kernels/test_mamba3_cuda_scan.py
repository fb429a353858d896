"""The CUDA lane against the float64 reference lane: output, final state and all fourteen gradients, on an H200."""

import pytest
import torch

pytest.importorskip("tilelang")
if not torch.cuda.is_available():
    pytest.skip("needs an H200", allow_module_level=True)

from kernels.mamba3_mimo.cuda.check import Case, check, make_inputs, ours
from kernels.mamba3_mimo.cuda.scan import Scan
from kernels.mamba3_mimo.cuda.variant import Variant

pytestmark = pytest.mark.gpu

CASES = {
    "reference": Case(B=4, S=2048, H=16, cumulated=True),
    "raw_angles": Case(B=2, S=1024, H=16),
    "odd_length": Case(B=2, S=1001, H=16),
    "groups": Case(B=2, S=512, H=16, G=4),
    "full_rotary": Case(B=2, S=512, H=16, rope=1.0),
}


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: `check` poisons the CUDA lane alone, the reference needs torch.cumsum."""
    return


@pytest.mark.parametrize("name", CASES)
def test_scan_matches_the_reference(name):
    errors, bad = check(CASES[name])
    assert not bad, {key: errors[key] for key in bad}


LIMITS_MISSED = {
    "documents": (Case(B=2, S=1024, H=16, documents=4), "angles"),
    "odd_long": (Case(B=1, S=8191, H=16), "angles"),
    "odd_long_cumulated": (Case(B=1, S=8191, H=16, cumulated=True), "trap"),
}
"""Cases that miss a limit in one gradient. Measured: raw angles 0.0124 and 0.0155, rows to 0.07, because they sum
rounded gradients backwards over a super-chunk; one trap row of 16 numbers in 8191 at 0.0501."""


@pytest.mark.parametrize("name", LIMITS_MISSED)
def test_limits_are_missed_by_no_more_than_recorded(name):
    case, gradient = LIMITS_MISSED[name]
    errors, bad = check(case)
    assert set(bad) <= {gradient}, {key: errors[key] for key in bad}
    assert all(errors[key][0] < 0.02 and errors[key][1] < 0.1 for key in bad), errors


def test_scan_twice_gives_equal_bits():
    inputs = make_inputs(CASES["raw_angles"])
    grad_out = torch.randn_like(inputs.v)
    first, second = (ours(inputs, grad_out, Variant()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_recomputed_states_give_the_saved_ones_gradients():
    errors, bad = check(CASES["raw_angles"], Variant(save_states=False))
    assert not bad, {key: errors[key] for key in bad}


def test_refused_variant_says_why():
    with pytest.raises(ValueError, match="psiv_cache"):
        Scan(make_inputs(CASES["groups"]), Variant(psiv_cache=True))
