"""The CUDA lane against the float64 reference lane: output, final state and all fourteen gradients, on an H200."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")
if not torch.cuda.is_available():
    pytest.skip("needs an H200", allow_module_level=True)

from kernels.mamba3_mimo.accuracy import Case, make_grad, make_inputs
from kernels.mamba3_mimo.cuda.check import check, ours
from kernels.mamba3_mimo.cuda.scan import Scan, shape_of
from kernels.mamba3_mimo.cuda.variant import Variant, refusal

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

OFFICIAL = (
    (16, 64, 4, 8), (32, 64, 4, 16), (64, 64, 4, 16), (128, 64, 4, 16), (256, 64, 4, 8), (64, 128, 4, 16),
    (128, 32, 4, 16), (128, 128, 4, 8), (128, 64, 8, 8), (128, 64, 2, 32), (128, 64, 1, 64),
)  # fmt: skip
"""(N, P, R, chunk_size) of the official tests."""

PLAIN = Case(B=2, S=1001, H=8)
LONG = Case(B=1, S=8191, H=16)

CASES = {
    "plain": PLAIN,
    "cumulated": replace(PLAIN, cumulated=True),
    "documents": replace(PLAIN, documents=4),
    "one_angle_set": replace(PLAIN, shared_angles=True),
    "documents_one_angle_set": replace(PLAIN, documents=4, shared_angles=True),
    "no_skip": replace(PLAIN, without=("D",)),
    "no_gate": replace(PLAIN, without=("z", "zeta")),
    "per_rank": replace(PLAIN, without=("phi",)),
    "bare": replace(PLAIN, without=("z", "zeta", "phi", "D")),
    "groups": replace(PLAIN, G=4),
    "full_rotary": replace(PLAIN, rope=1.0),
    "odd_heads": replace(PLAIN, H=5, shared_angles=True),
    "one_token": replace(PLAIN, S=1),
    "five_tokens": replace(PLAIN, S=5),
    "long": LONG,
    "long_cumulated": replace(LONG, cumulated=True),
    "long_documents": replace(LONG, documents=4),
}

SWITCHES = {
    "tma_off": {"tma": False},
    "warp_specialize": {"warp_specialize": True},
    "warp_specialize_tma_off": {"warp_specialize": True, "tma": False},
    "aggressive_smem_merge": {"aggressive_smem_merge": True},
    "layout_3d": {"layout_2d": False},
    "layout_3d_tma_off": {"layout_2d": False, "tma": False},
    "psiv_cache": {"psiv_cache": True},
    "psiv_cache_recomputed": {"psiv_cache": True, "save_states": False},
    "recomputed": {"save_states": False},
    "exact_math": {"fast_math": False},
    "sequential": {"schedule": "sequential"},
    "sequential_cached": {"schedule": "sequential", "psiv_cache": True},
    "chunk_8": {"chunk_size": 8},
    "chunk_32": {"chunk_size": 32},
    "superchunk_64": {"superchunk": 64},
    "superchunk_512": {"superchunk": 512},
    "synchronous": {"pipeline_stages": 0},
    "double_buffered": {"pipeline_stages": 2},
}


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
    assert_right(Case(B=2, S=1024, H=8, N=state, P=width, R=rank, cumulated=True), Variant(chunk_size=chunk))


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_every_rank_matches_the_reference_with_documents_and_raw_angles(rank):
    assert_right(replace(PLAIN, R=rank, documents=3), Variant(chunk_size=64 // rank))


@pytest.mark.parametrize("name", SWITCHES)
def test_every_allowed_switch_matches_the_reference(name):
    variant, case = Variant(**SWITCHES[name]), replace(PLAIN, documents=2)
    reason = refusal(variant, shape_of(make_inputs(case), variant))
    if reason is None:
        assert_right(case, variant)
    else:
        with pytest.raises(ValueError, match=re.escape(reason)):
            Scan(make_inputs(case), variant)


@pytest.mark.parametrize("name", ["documents", "documents_one_angle_set", "per_rank"])
def test_scan_twice_gives_equal_bits(name):
    inputs = make_inputs(CASES[name])
    first, second = (ours(inputs, make_grad(inputs, 1), Variant()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


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
