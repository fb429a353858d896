"""The CUDA lane's host code without a GPU: shapes, refusals, padding, buffers, and what every kernel is given."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.cuda.forward.prefix import lanes_for
from ablate.kernels.mamba3_mimo.cuda.host import scan, sizes
from ablate.kernels.mamba3_mimo.cuda.host.compiled import KERNELS, needed
from ablate.kernels.mamba3_mimo.cuda.host.refusals import CHUNK_ROWS, RANKS, refusal
from ablate.kernels.mamba3_mimo.cuda.pieces.positions import EDGE
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import tensors
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant, padded_angles
from tests.kernels import scan_cases
from tests.kernels.accuracy import compare
from tests.kernels.problem import Case, make_grad, make_inputs

SHAPE = ScanShape(B=2, S=512, H=4, G=1, N=64, P=64, R=4, A=16)


class Recorded(scan.Scan):
    """A scan that launches nothing and keeps what each kernel would have been given."""

    def __init__(self, inputs, variant):
        self.launched = {}
        super().__init__(inputs, variant)

    def run(self, name, *arguments):
        """Keep the tensors."""
        assert name in KERNELS
        made = [argument for argument in arguments if not isinstance(argument, int)]
        assert all(tensor.is_contiguous() for tensor in made), name
        self.launched[name] = made


@pytest.fixture(autouse=True)
def every_variant_allowed(monkeypatch):
    """The host code is tested for combinations that a kernel may refuse, too."""
    monkeypatch.setattr(scan, "refusal", lambda variant, shape: None)


def launched(case, variant=None):
    inputs = make_inputs(case, "cpu")
    made = Recorded(inputs, variant or Variant())
    out, state, saved = made.forward(return_final_state=True)
    grads = made.backward(make_grad(inputs, 1), saved)
    return inputs, made, (out, state, saved), grads


CASES = {
    "plain": (Case(), Variant()),
    "documents": (Case(S=500, documents=3), Variant()),
    "cumulated": (Case(S=41, cumulated=True), Variant()),
    "one_token": (Case(S=1), Variant()),
    "shared_angles": (Case(S=77, shared_angles=True), Variant()),
    "without_gate": (Case(without=("z", "zeta")), Variant()),
    "per_rank": (Case(S=100, without=("phi",)), Variant()),
    "bare": (Case(without=("z", "zeta", "phi", "D")), Variant()),
    "narrow": (Case(N=16, P=32, R=8), Variant(chunk_size=8)),
    "wide": (Case(N=256, P=128, R=1, rope=1.0, G=2), Variant(chunk_size=64)),
    "cached": (Case(), Variant(psiv_cache=True)),
    "sequential": (Case(S=700), Variant(schedule="sequential")),
    "remat": (Case(S=700, documents=2), Variant(remat=True)),
    "remat,sequential": (Case(S=700), Variant(remat=True, schedule="sequential")),
}


@pytest.mark.parametrize("name", CASES)
def test_every_output_has_the_shape_of_its_tensor(name):
    case, variant = CASES[name]
    inputs, made, (out, state, saved), grads = launched(case, variant)
    assert out.shape == make_grad(inputs, 1).shape
    assert out.dtype == torch.bfloat16
    assert state.shape == (case.B, case.H, case.N, case.P)
    assert len(saved) == len(made.saved)
    assert {key: grad.shape for key, grad in grads.items()} == {
        key: tensor.shape for key, tensor in zip(inputs.names, inputs.tensors(), strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_kernels_built_before_a_pass_are_those_that_it_launches(name):
    case, variant = CASES[name]
    inputs = make_inputs(case, "cpu")
    made = Recorded(inputs, variant)
    *_, saved = made.forward()
    forward = set(made.launched)
    made.launched.clear()
    made.backward(make_grad(inputs, 1), saved)
    assert forward == set(needed("forward", made.shape, made.variant))
    assert set(made.launched) == set(needed("backward", made.shape, made.variant))


def test_optional_tensors_and_caches_decide_what_the_kernels_are_given():
    def given(case=CASES["plain"][0], **switches):
        made = launched(case, Variant(**switches))[1]
        return {name: len(tensors) for name, tensors in made.launched.items()}

    full = given()
    without_gate, per_rank = given(Case(without=("z", "zeta"))), given(Case(without=("phi",)))
    assert full["outputs"] - without_gate["outputs"] == 2
    assert full["gradients"] - without_gate["gradients"] == 4
    assert full["gradients"] - per_rank["gradients"] == 2
    assert given(Case(without=("D",))) == full
    cached = given(psiv_cache=True)
    assert (cached["outputs"] - full["outputs"], cached["gradients"] - full["gradients"]) == (1, 1)
    sequential = given(schedule="sequential")
    assert not {"local_states", "pass_states", "local_gradients", "pass_gradients"} & set(sequential)
    assert sequential["outputs"] == full["outputs"] + 1


def test_only_what_the_backward_pass_reads_is_saved():
    names = ("plain", "sequential", "remat", "remat,sequential")
    saved = {name: launched(CASES[name][0], CASES[name][1])[1].saved for name in names}
    assert [("start" in saved[name], "states" in saved[name]) for name in names] == [
        (False, True), (False, True), (True, False), (False, False),
    ]  # fmt: skip
    assert not {"wq", "carry"} & (set(saved["sequential"]) | set(saved["remat,sequential"]))


def test_padding_is_zero_and_documents_are_marked():
    inputs, made, *_ = launched(Case(S=41, documents=2))
    assert (made.shape.S, made.shape.L) == (64, 64)
    assert all(made.t[name][:, 41:].count_nonzero() == 0 for name in ("q", "k", "v", "z", "angles"))
    assert all(made.t[name][..., 41:].count_nonzero() == 0 for name in ("adt", "dt", "trap"))
    reset = made.launched["decays"][3]
    assert reset.sum(1).tolist() == (inputs.segment_ids[:, 1:] != inputs.segment_ids[:, :-1]).sum(1).tolist()


@pytest.mark.parametrize("remat", [False, True])
def test_kernels_are_given_aligned_addresses(remat, monkeypatch):
    monkeypatch.setattr(sizes, "blocks_at_once", lambda state: 3)
    inputs = make_inputs(Case(B=7, S=64, H=3), "cpu")
    shifted = tuple(torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in inputs.tensors())
    assert all(tensor.data_ptr() % scan.ALIGNMENT for tensor in shifted)
    made = Recorded(inputs.with_tensors(shifted), Variant(remat=remat, superchunk=64))
    *_, saved = made.forward()
    made.backward(torch.cat((inputs.v.new_zeros(1), make_grad(inputs, 1).flatten()))[1:].view(inputs.v.shape), saved)
    offsets = {name: [t.data_ptr() % scan.ALIGNMENT for t in tensors] for name, tensors in made.launched.items()}
    assert {name: places for name, places in offsets.items() if any(places)} == {}
    assert made.launched["gradients"][0].shape[0] == (3 if remat else 7)  # the last piece of two
    assert all(torch.equal(made.t[name], getattr(inputs, name)) for name in ("q", "adt", "angles"))


def test_missing_skip_is_a_skip_of_zero():
    made = launched(Case(without=("D",)))[1]
    assert made.t["D"].tolist() == [0.0] * 4


def test_angles_are_padded_to_what_the_kernels_turn():
    assert [padded_angles(angles, n) for angles, n in ((4, 16), (8, 16), (8, 32), (16, 64), (64, 256))] == [
        8, 8, 16, 16, 64,
    ]  # fmt: skip


@pytest.mark.parametrize("angles", [8, 16, 32, 64, 128])
def test_a_warp_covers_its_tokens_and_angles_once(angles):
    lanes = lanes_for(replace(SHAPE, N=2 * angles, A=angles))
    seen = [
        (part * lanes.run + i, tile * lanes.width + group * 8 + e)
        for tile in range(lanes.rounds)
        for part in range(lanes.parts)
        for group in range(lanes.groups)
        for i in range(lanes.run)
        for e in range(8)
    ]
    assert sorted(seen) == [(t, j) for t in range(EDGE) for j in range(angles)]
    assert lanes.groups * lanes.parts == 32


def test_edges_cover_the_sequence_at_the_distance_of_a_warp():
    assert tensors(replace(SHAPE, S=1280, L=640))["edges"][0] == (4, 4, 10, 2, 64)
    assert tensors(replace(SHAPE, S=32, L=16))["edges"][0] == (4, 4, 1, 2, 64)


def test_the_default_variant_runs_the_reference_shape():
    assert refusal(Variant(), SHAPE) is None


@pytest.mark.parametrize(
    ("variant", "shape", "reason"),
    [
        (Variant(schedule="backwards"), SHAPE, "schedule is 'backwards'; allowed: sequential, chunk_parallel"),
        (Variant(), replace(SHAPE, R=3), "rank is 3; allowed: 1, 2, 4, 8"),
        (Variant(), replace(SHAPE, N=48), "state size is 48; allowed: 16, 32, 64, 128, 256"),
        (Variant(), replace(SHAPE, P=96), "head width is 96; allowed: 32, 64, 128"),
        (Variant(), replace(SHAPE, C=12), "chunk_size is 12; allowed: 8, 16, 32, 64"),
        (Variant(), replace(SHAPE, C=64), r"chunk_size \* rank is 64 \* 4 = 256; allowed: 32, 64, 128"),
        (Variant(), replace(SHAPE, L=100), "superchunk is 100; allowed: a multiple of chunk_size = 16"),
        (Variant(), replace(SHAPE, L=48), "superchunk is 48; allowed: a multiple of chunk_size = 16 that"),
        (Variant(), replace(SHAPE, B=2**15), "super-chunks of a row is 65536; allowed: 65535"),
        (Variant(pipeline_stages=3), SHAPE, "pipeline_stages is 3; allowed: 0, 1, 2"),
        (Variant(chunk_size=8), replace(SHAPE, P=128, C=8), "rank is 32 with N = 64 and P = 128; allowed: 64"),
        (Variant(), replace(SHAPE, N=16, P=128), "rank is 64 with N = 16 and P = 128; allowed: 32"),
        (Variant(), replace(SHAPE, N=16, R=8), "rank is 128 with N = 16; allowed: 32, 64"),
        (Variant(), replace(SHAPE, N=32, R=8), "rank is 128 with N = 32; allowed: 32, 64"),
        (
            Variant(psiv_cache=True),
            replace(SHAPE, P=32, R=8),
            "psiv_cache with 128 rows of width 32 in a chunk; allowed: up to 64",
        ),
        (
            Variant(psiv_cache=True, chunk_size=32),
            replace(SHAPE, P=128, R=2, C=32),
            "psiv_cache with 64 rows of width 128",
        ),
        (
            Variant(psiv_cache=True),
            replace(SHAPE, N=128),
            "pipeline_stages 1, which takes two warp groups; allowed: 64 rows with pipeline_stages 0",
        ),
        (
            Variant(psiv_cache=True, pipeline_stages=0, chunk_size=8),
            replace(SHAPE, N=128, C=8),
            "32 rows in a chunk and pipeline_stages 0, which takes two warp groups",
        ),
        (
            Variant(),
            replace(SHAPE, N=32, P=128, R=2),
            "rank 2 with N = 32, P = 128 and chunk_size 16; allowed: another",
        ),
        (Variant(chunk_size=32), replace(SHAPE, N=32, R=1, C=32), "rank 1 with N = 32, P = 64 and chunk_size 32"),
        (Variant(chunk_size=32), replace(SHAPE, N=16, P=128, R=1, C=32), "rank 1 with N = 16, P = 128 and chunk_size"),
        (
            Variant(warp_specialize=True),
            replace(SHAPE, P=128),
            "warp_specialize with state size 64, head width 128 and",
        ),
        (Variant(warp_specialize=True, pipeline_stages=0), SHAPE, "the warp group that copies runs at least one chunk"),
        (Variant(warp_specialize=True, psiv_cache=True), SHAPE, "psiv_cache True.*; allowed: sizes of the lifted form"),
        (Variant(heads_in_turn=3), SHAPE, "heads_in_turn is 3; allowed: 0, 1, 2, 4"),
        (
            Variant(heads_in_turn=2),
            replace(SHAPE, in_turn=2, P=128),
            "heads_in_turn is 2 with state size 64, head width",
        ),
        (Variant(heads_in_turn=4), replace(SHAPE, in_turn=4, H=6), "heads_in_turn is 4 with 6 heads in a group"),
        (
            Variant(pipeline_stages=2, chunk_size=8),
            replace(SHAPE, N=128, C=8),
            "pipeline_stages is 2 with P = 64, 32 rows and two warp groups; allowed: 0, 1",
        ),
        (
            Variant(warp_specialize=True, tma=False),
            SHAPE,
            "warp_specialize with tma off: a warp group of its own issues",
        ),
    ],
)
def test_what_no_kernel_does_is_refused_with_what_is_allowed(variant, shape, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusal(variant, shape))


def test_a_scan_that_is_refused_says_why(monkeypatch):
    monkeypatch.setattr(scan, "refusal", refusal)
    with pytest.raises(KernelUnsupported, match="warp_specialize with tma off"):
        scan.Scan(make_inputs(Case(), "cpu"), Variant(warp_specialize=True, tma=False))
    with pytest.raises(KernelUnsupported, match=r"N=256, P=64, 64 rows.*; heads of width 128 run as two of 64"):
        scan.Scan(make_inputs(Case(N=256, P=128), "cpu"), Variant())


@pytest.mark.parametrize(("case", "variant"), [pytest.param(c, v, id=name) for name, c, v in scan_cases.every()])
def test_every_problem_of_the_gpu_tests_is_allowed(case, variant, monkeypatch):
    monkeypatch.setattr(scan, "refusal", refusal)
    scan.Scan(make_inputs(case, "cpu"), variant)  # raises the reason if not


def test_every_allowed_rank_has_a_chunk_of_one_row_block():
    assert all(64 // rank * rank in CHUNK_ROWS for rank in RANKS)


def test_an_error_is_measured_globally_and_per_time_row():
    want = {"out": torch.ones(1, 4, 2, 2, dtype=torch.float64)}
    got = {"out": want["out"].clone()}
    got["out"][0, 2] *= 1.5
    assert compare(got, want) == {"out": (0.5, 0.5)}
    got["out"][0, 0, 0, 0] = float("nan")
    assert not compare(got, want)["out"][0] < 1


def test_a_gradient_that_vanishes_is_measured_absolutely():
    exact, got = {"adt": torch.zeros(1, 2, 1).double()}, {"adt": torch.full((1, 2, 1), 1e-6)}
    overall, row = compare(got, exact)["adt"]
    assert overall == pytest.approx(1e-3)
    assert row == pytest.approx(2**0.5 * 1e-3)
