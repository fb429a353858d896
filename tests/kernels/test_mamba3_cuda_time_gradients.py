"""The kernel of the gradients of decay and angles, interpreted without rounding: where its sums start and stop."""

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("tilelang")

from torch import Tensor

from ablate.kernels.mamba3_mimo.cuda.host.compiled import program
from ablate.kernels.mamba3_mimo.cuda.pieces.positions import EDGE
from ablate.kernels.mamba3_mimo.cuda.pieces.tensors import tensors
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from tests.kernels import tile_interpreter

TOKENS = 2 * EDGE + 9
SHAPE = ScanShape(B=2, S=3 * EDGE, H=5, G=1, N=64, P=64, R=4, A=16, L=EDGE)
ANGLES = {
    "8_angles": replace(SHAPE, N=16, A=8),
    "16_angles": SHAPE,
    "32_angles": replace(SHAPE, A=32),
    "64_angles": replace(SHAPE, N=128, A=64),
    "16_shared_angles": replace(SHAPE, shared_angles=True),
    "32_shared_angles": replace(SHAPE, A=32, shared_angles=True),
}
DOCUMENTS = {
    "one": (),
    "inside": (21,),
    "several_in_a_block": (5, 6, 7, 12, 40, 41),
    "at_the_first_token_of_a_block": (EDGE,),
    "at_the_last_token_of_a_block": (EDGE - 1,),
    "of_one_token_between_blocks": (EDGE - 1, EDGE),
    "at_the_second_token": (1, EDGE + 1),
    "at_the_last_token": (TOKENS - 1,),
    "everywhere": (1, 2, 3, 30, 62, 63, 64, 65, 100, 126, 127, 128, 131, TOKENS - 2, TOKENS - 1),
    "each_token_one": tuple(range(1, TOKENS)),
}


class Problem(NamedTuple):
    """What the walk may leave behind for one row: per-token values that do not sum to what the edges say."""

    shape: ScanShape
    starts: tuple[int, ...]
    dt: Tensor
    angles: Tensor
    row_q: Tensor
    row_k: Tensor
    dtheta: Tensor
    edges: Tensor


def problem(shape: ScanShape, starts: tuple[int, ...]) -> Problem:
    gen = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, dtype=torch.float64)

    s = shape
    edges, dtheta = normal(s.B, s.H, s.S // EDGE, 2, s.N), normal(s.B, s.H, s.S, s.A)
    edges[:, :, 0] = math.nan  # nobody reads it
    dtheta[:, :, TOKENS:] = 0.0
    dt, angles = normal(s.B, s.H, s.S).exp(), normal(s.B, s.S, s.angle_heads, s.A)
    return Problem(s, starts, dt, angles, normal(s.B, s.H, s.S), normal(s.B, s.H, s.S), dtheta, edges)


def by_walks(values_BHS: Tensor, s: ScanShape) -> Tensor:
    """Return what is known per token as the walks write it, [B*K,H,L,...]."""
    return values_BHS.unflatten(2, (s.K, s.L)).transpose(1, 2).flatten(0, 1).contiguous()


def edges_of_walks(edges: Tensor, s: ScanShape) -> Tensor:
    by_walk = torch.full(tensors(s)["edges"][0], math.nan, dtype=torch.float64)
    for b, blk in product(range(s.B), range(s.S // EDGE)):
        walk, t = s.place(b, blk * EDGE)
        by_walk[walk, :, t // EDGE] = edges[b, :, blk]
    return by_walk


def computed(p: Problem) -> dict[str, Tensor]:
    """Return the kernel's gradients of adt, dt and angles. No other term of that of dt is there: ds and same are 0."""
    s = p.shape
    reset = torch.zeros(s.B, s.S, dtype=torch.int32)
    reset[:, list(p.starts)] = 1
    one, none = torch.ones(s.walks, s.H, s.L).double(), torch.zeros(s.walks, s.H, s.L).double()
    row_q, row_k, dtheta = (by_walks(values, s) for values in (p.row_q, p.row_k, p.dtheta))
    dadt, ddt, dtrap = (torch.full_like(p.dt, math.nan) for _ in range(3))
    dangles = torch.full_like(p.angles, math.nan)
    tile_interpreter.run(
        program("time_gradients", s, Variant()),
        p.dt, torch.zeros_like(p.dt), reset, one, row_q, row_k, none, row_k, edges_of_walks(p.edges, s), p.angles,
        dtheta, dadt, ddt, dtrap, dangles, TOKENS,
    )  # fmt: skip
    return {"adt": dadt[..., :TOKENS], "dt": ddt[..., :TOKENS], "angles": dangles[:, :TOKENS]}


def sums(values_BHTW: Tensor, edges_BHKW: Tensor, starts: tuple[int, ...]) -> Tensor:
    """Return the sums from each token on to the end of its document, by the definition.

    The values of a span, the part of a document in a block, are all shifted alike until they sum to what they must.
    """
    exact = torch.zeros_like(values_BHTW)
    exact[:, :, EDGE:TOKENS:EDGE] = edges_BHKW[:, :, 1:]
    exact[:, :, [t for t in starts if t % EDGE]] = 0.0
    out_BHTW = torch.zeros_like(values_BHTW)
    for first, after in pairwise(sorted({0, TOKENS, *starts, *range(0, TOKENS, EDGE)})):
        own, rest = values_BHTW[:, :, first:after], exact[:, :, after, None]
        shift = (exact[:, :, first, None] - rest - own.sum(2, keepdim=True)) / (after - first)
        out_BHTW[:, :, first:after] = (own + shift).flip(2).cumsum(2).flip(2) + rest
    return out_BHTW


def expected(p: Problem) -> dict[str, Tensor]:
    s, half = p.shape, p.shape.N // 2
    turn = p.edges[:, :, :, 1, : s.A] - p.edges[:, :, :, 1, half : half + s.A]
    angle = sums(p.dtheta, turn, p.starts)[:, :, :TOKENS].transpose(1, 2) * math.pi
    decay = sums((p.row_q - p.row_k).unsqueeze(-1), p.edges[:, :, :, 0].sum(-1, keepdim=True), p.starts)
    bent, dt = p.angles.tanh()[:, :TOKENS], p.dt[..., :TOKENS].transpose(1, 2).unsqueeze(-1)
    dangles = angle * dt * (1 - bent**2)
    dadt = decay[:, :, :TOKENS, 0].clone()
    dadt[:, :, list(p.starts)] = 0.0
    return {
        "adt": dadt,
        "dt": (angle * bent).sum(-1).transpose(1, 2),
        "angles": dangles.sum(2, keepdim=True) if s.shared_angles else dangles,
    }


def assert_as_expected(p: Problem) -> None:
    actual = computed(p)
    for name, want in expected(p).items():
        torch.testing.assert_close(
            actual[name], want, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sums_stop_where_documents_end(name):
    assert_as_expected(problem(SHAPE, DOCUMENTS[name]))


@pytest.mark.parametrize("length", [16, 32, 3 * EDGE])
def test_walks_may_be_shorter_or_longer_than_a_block(length):
    assert_as_expected(problem(replace(SHAPE, L=length), DOCUMENTS["everywhere"]))


@pytest.mark.parametrize("name", ANGLES)
@pytest.mark.parametrize("starts", ["one", "everywhere"])
def test_lanes_share_out_the_angles(name, starts):
    assert_as_expected(problem(ANGLES[name], DOCUMENTS[starts]))


def test_noise_of_one_document_stays_there():
    starts = DOCUMENTS["everywhere"]
    quiet = problem(SHAPE, starts)
    loud = quiet._replace(row_q=quiet.row_q.clone(), dtheta=quiet.dtheta.clone())
    loud.row_q[:, :, 30:62] += 1e6
    loud.dtheta[:, :, 30:62] += 1e6
    before, after = computed(quiet), computed(loud)
    others = torch.tensor([t for t in range(TOKENS) if not 30 <= t < 62])
    for name, axis in (("adt", 2), ("dt", 2), ("angles", 1)):
        assert torch.equal(after[name].index_select(axis, others), before[name].index_select(axis, others)), name


def test_the_sum_from_a_document_start_on_vanishes_and_that_from_an_edge_on_is_exact():
    p = problem(SHAPE, (21, 40))
    gradients = computed(p)
    assert gradients["angles"][:, [0, 21, 40]].abs().max() < 1e-12
    torch.testing.assert_close(gradients["adt"][..., EDGE], p.edges[:, :, 1, 0].sum(-1))
    torch.testing.assert_close(gradients["adt"][..., 2 * EDGE], p.edges[:, :, 2, 0].sum(-1))
