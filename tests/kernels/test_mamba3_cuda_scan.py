"""The CUDA lane against the float64 reference lane: output, final state and all fourteen gradients, on an H200."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")
if not torch.cuda.is_available():
    pytest.skip("needs an H200", allow_module_level=True)

from kernels.backends import Lane
from kernels.mamba3_mimo import mamba3_mimo
from kernels.mamba3_mimo.accuracy import Case, compare, make_grad, make_inputs, outputs, over_limits
from kernels.mamba3_mimo.cuda.host.compiled import kernels_made
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.exact import reference
from kernels.scan import ScanSwitches
from tests.kernels.checked import check, ours
from tests.kernels.scan_cases import (
    CASES,
    HALVED,
    MERGED,
    OFFICIAL,
    RANKS,
    STATE_CASES,
    SWITCHES,
    WIDE,
    halved,
    merged,
    of_rank,
    official,
    switched,
    switched_wide,
)
from tests.kernels.states import chained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: `check` poisons the CUDA lane alone, the reference needs torch.cumsum."""
    return


def assert_right(case, variant):
    errors, bad = check(case, variant)
    assert not bad, {key: errors[key] for key in bad}


@pytest.mark.parametrize("name", CASES)
def test_scan_matches_the_reference(name):
    assert_right(CASES[name], Variant())


@pytest.mark.parametrize(("state", "width", "rank", "chunk"), OFFICIAL)
def test_official_shapes_match_the_reference(state, width, rank, chunk):
    assert_right(*official(state, width, rank, chunk))


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_matches_the_reference_with_documents_and_raw_angles(rank):
    assert_right(*of_rank(rank))


@pytest.mark.parametrize("name", SWITCHES)
def test_every_allowed_switch_matches_the_reference(name):
    assert_right(*switched(name))


@pytest.mark.parametrize("name", WIDE)
def test_switch_with_two_warp_groups_matches_the_reference(name):
    assert_right(*switched_wide(name))


@pytest.mark.parametrize("name", MERGED)
def test_merged_buffers_change_nothing(name):
    assert_right(*merged(name))


@pytest.mark.parametrize(("state", "width", "rank", "chunk"), HALVED)
def test_halved_heads_match_the_reference(state, width, rank, chunk):
    assert_right(*halved(state, width, rank, chunk))


@pytest.mark.parametrize("name", STATE_CASES)
def test_states_in_and_out_match_the_reference(name):
    case, switches = STATE_CASES[name]
    assert_right(case, Variant(**switches))


@pytest.mark.parametrize("switches", [{}, {"schedule": "sequential"}], ids=["chunk_parallel", "sequential"])
def test_two_halves_chained_equal_the_whole(switches):
    """As near to the float64 reference as a whole row has to be."""
    inputs = make_inputs(replace(CASES["documents"], H=4))
    lane = ScanSwitches(lane=Lane.CUDA, **switches)

    def scan(given, before):
        return mamba3_mimo(given, lane, initial_state=before, return_final_state=True)

    def halves(given):
        result = chained(given, (501,), scan)
        return result.out, result.final_state.state

    grad_out = make_grad(inputs, 1)
    errors = compare(outputs(halves, inputs, grad_out), reference(inputs, grad_out))
    assert not over_limits(errors), errors


@pytest.mark.parametrize("name", ["documents", "documents_one_angle_set", "per_rank"])
def test_scan_twice_gives_equal_bits(name):
    inputs = make_inputs(CASES[name])
    first, second = (ours(inputs, make_grad(inputs, 1), Variant()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_batch_or_length_compiles_nothing_and_is_right():
    assert_right(Case(B=2, S=300, H=4), Variant(superchunk=64))
    before = kernels_made()
    for batch, length in ((3, 1000), (1, 1), (5, 64), (1, 65)):
        assert_right(Case(B=batch, S=length, H=4), Variant(superchunk=64))
    assert kernels_made() == before


def test_psiv_cache_changes_no_bit():
    inputs = make_inputs(CASES["documents"])
    cached, made = (ours(inputs, make_grad(inputs, 1), Variant(psiv_cache=cache)) for cache in (True, False))
    assert all(torch.equal(cached[name], made[name]) for name in made)


def test_a_scan_is_captured_in_a_graph():
    inputs = make_inputs(CASES["documents"])
    grad_out = make_grad(inputs, 1)
    want = ours(inputs, grad_out, Variant())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ours(inputs, grad_out, Variant())
    graph.replay()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_peak_memory_at_the_reference_shape_is_at_most_the_official_one():
    inputs = make_inputs(Case(B=8, S=8192, H=16))
    grad_out = make_grad(inputs, 1)
    torch.cuda.reset_peak_memory_stats()
    ours(inputs, grad_out, Variant())
    assert torch.cuda.max_memory_allocated() / 2**30 <= 2.82
