"""The CUDA lane on an H100 or H200 matches the float64 reference lane: output, final state and all 14 gradients."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host.compiled import num_kernels
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels import criterion
from tests.kernels.checked import ours, wrong
from tests.kernels.problem import Case, make_grad, make_inputs, outputs
from tests.kernels.scan_cases import CASES, COMPARED, SCHEDULE_ONLY, each, scan_problem, switched
from tests.kernels.states import chained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
scans = pytest.mark.scans
ANY_SIZES = [Case(B=batch, S=length, H=4) for batch, length in ((2, 300), (3, 1000), (1, 1), (5, 64), (1, 65))]
LARGE = Case(B=8, S=8192, H=16)
GENERAL = replace(CASES["documents"], N=32)


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: `wrong` poisons the CUDA lane alone, the reference needs torch.cumsum."""
    return


def assert_right(case, variant):
    bad = wrong(case, variant)
    assert not bad


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["cases"]))
def test_scan_matches_the_reference(case, variant):
    assert_right(case, variant)


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["official"]))
def test_official_shapes_match_the_reference(case, variant):
    assert_right(case, variant)


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["ranks"]))
def test_every_rank_matches_the_reference_with_documents_and_raw_angles(case, variant):
    assert_right(case, variant)


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["switches"]))
def test_every_allowed_switch_matches_the_reference(case, variant):
    assert_right(case, variant)


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["wide"]))
def test_switch_with_two_warp_groups_matches_the_reference(case, variant):
    assert_right(case, variant)


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["merged"]))
def test_merged_buffers_change_nothing(case, variant):
    assert_right(case, variant)


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["halved"]))
def test_halved_heads_match_the_reference(case, variant):
    assert_right(case, variant)


@pytest.mark.parametrize(("case", "variant"), each(COMPARED["states"]))
def test_states_in_and_out_match_the_reference(case, variant):
    assert_right(case, variant)


def halved_row(schedule):
    """Return the scans of a row that is cut in two: the second one begins with the state of the first."""
    halves = (replace(CASES["documents"], started=started) for started in (False, True))
    return [scan_problem(half, Variant(schedule=schedule)) for half in halves]


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=scans(*halved_row(name))) for name in ("chunk_parallel", "sequential")]
)
def test_two_halves_chained_equal_the_whole(schedule):
    """As near to the float64 reference as a whole row has to be."""
    half = CASES["documents"].S
    inputs = make_inputs(replace(CASES["documents"], S=2 * half))
    lane = ScanSwitches(lane=Lane.CUDA, schedule=schedule)

    def scan(given, before):
        return mamba3_mimo(given, lane, initial_state=before, return_final_state=True)

    def halves(given):
        result = chained(given, (half,), scan)
        return result.out, result.final_state.state

    grad_out = make_grad(inputs, 1)
    bad = criterion.wrong(outputs(halves, inputs, grad_out), inputs, grad_out)
    assert not bad


@pytest.mark.parametrize(
    ("case", "variant"),
    each({name: (CASES[name], Variant()) for name in ("documents", "documents_one_angle_set", "per_rank")}),
)
def test_scan_twice_gives_equal_bits(case, variant):
    inputs = make_inputs(case)
    first, second = (ours(inputs, make_grad(inputs, 1), variant) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@scans(*(scan_problem(case, Variant(superchunk=64)) for case in ANY_SIZES))
def test_another_batch_or_length_compiles_nothing_and_is_right():
    assert_right(ANY_SIZES[0], Variant(superchunk=64))
    before = num_kernels()
    for case in ANY_SIZES[1:]:
        assert_right(case, Variant(superchunk=64))
    assert num_kernels() == before


@scans(*(scan_problem(GENERAL, Variant(psiv_cache=cache)) for cache in (True, False)))
def test_psiv_cache_changes_no_bit_where_the_backward_walk_has_one_form():
    inputs = make_inputs(GENERAL)
    cached, made = (ours(inputs, make_grad(inputs, 1), Variant(psiv_cache=cache)) for cache in (True, False))
    assert all(torch.equal(cached[name], made[name]) for name in made)


def both_ways(name):
    """Return the scans of a problem with a switch of SWITCHES and without it."""
    case, variant = switched(name)
    return [scan_problem(case, given) for given in (variant, Variant())]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=scans(*both_ways(name))) for name in (*SCHEDULE_ONLY, "heads_in_turn_2")]
)
def test_switch_that_claims_it_changes_no_bit_of_the_forward_pass(name):
    """As a training step takes it: the claim is about the loss of step 1. Heads in turn re-associate behind it."""
    case, variant = switched(name)
    inputs = make_inputs(case)
    there, plain = (ours(inputs, make_grad(inputs, 1), given)["out"] for given in (variant, Variant()))
    assert torch.equal(there, plain)


@scans(scan_problem(CASES["documents"]))
def test_a_scan_is_captured_in_a_graph():
    inputs = make_inputs(CASES["documents"])
    grad_out = make_grad(inputs, 1)
    want = ours(inputs, grad_out, Variant())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ours(inputs, grad_out, Variant())
    graph.replay()
    assert all(torch.equal(got[name], want[name]) for name in want)


@scans(scan_problem(LARGE))
def test_peak_memory_at_the_reference_shape_is_at_most_the_official_one():
    inputs = make_inputs(LARGE)
    grad_out = make_grad(inputs, 1)
    torch.cuda.reset_peak_memory_stats()
    ours(inputs, grad_out, Variant())
    assert torch.cuda.max_memory_allocated() / 2**30 <= 2.82
