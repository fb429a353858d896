"""`remat` on lane cuda: the same bits from less that is kept, whatever the pieces; and the pieces themselves."""

from random import Random

import pytest
import torch

pytest.importorskip("tilelang")

from hypothesis import given, settings
from hypothesis import strategies as st

from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import sizes
from ablate.kernels.mamba3_mimo.cuda.host.lengths import blocks_at_once
from ablate.kernels.mamba3_mimo.cuda.shape import ALIGNMENT, ScanShape
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.interpreted_lane import interpreted_lane
from tests.kernels.problem import Case, make_grad, make_inputs
from tests.kernels.states import random_state

DRAWS = 3


def drawn(seed: int) -> tuple[Case, dict[str, object], bool, int]:
    """Return sizes, switches, whether a state enters, and how many blocks run at once."""
    rnd = Random(seed)  # noqa: S311 - not for secrets
    schedule = ("chunk_parallel", "sequential")[seed % 2]
    case = Case(
        B=rnd.randint(1, 3), S=rnd.randint(1, 90), H=rnd.choice((1, 2, 3)), N=32, P=32, documents=rnd.randint(1, 2),
        without=rnd.choice(((), ("z", "zeta"), ("phi",), ("D",))), shared_angles=rnd.random() < 0.3,
    )  # fmt: skip
    switches = {"schedule": schedule, "superchunk": 0 if schedule == "sequential" else rnd.choice((16, 32))}
    return case, switches, rnd.random() < 0.6, rnd.randint(1, 6)


def everything(case: Case, started: bool, **switches: object) -> list[torch.Tensor]:
    """Return o, the final state and every gradient of a random sum of both."""
    inputs = make_inputs(case, "cpu")
    before = random_state(inputs, seed=3) if started else None
    leaves = inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors()))
    states = () if before is None else tuple(t.requires_grad_() for t in before[:2])
    asked = ScanSwitches(lane=Lane.CUDA, **switches)
    out, final = mamba3_mimo(leaves, asked, initial_state=before, return_final_state=True)
    towards = (make_grad(inputs, 1), torch.randn(final.state.shape, generator=torch.Generator().manual_seed(2)))
    grads = torch.autograd.grad((out, final.state), (*leaves.tensors(), *states), towards)
    return [out.detach(), final.state.detach(), *grads]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DRAWS))
def test_making_states_again_changes_no_bit(seed, monkeypatch):
    case, switches, started, blocks = drawn(seed)
    cut = []
    monkeypatch.setattr(sizes, "blocks_at_once", lambda state: blocks)
    made = sizes._of_size
    monkeypatch.setattr(sizes, "_of_size", lambda s, size: cut.append(-(-s.walks // size)) or made(s, size))
    with interpreted_lane():
        kept, again = (everything(case, started, **switches, remat=remat) for remat in (False, True))
    assert [torch.equal(one, other) for one, other in zip(kept, again, strict=True)] == [True] * len(kept)
    assert cut, "the states were kept"


@settings(max_examples=400, deadline=None)
@given(
    rows=st.integers(1, 300), per_row=st.integers(1, 40), heads=st.integers(1, 130),
    state=st.sampled_from((16, 64, 128, 256)), width=st.sampled_from((32, 64, 128)),
)  # fmt: skip
def test_pieces_are_all_walks_in_order_in_as_many_waves(rows, per_row, heads, state, width):
    s = ScanShape(B=rows, S=64 * per_row, L=64, H=heads, G=1, N=state, P=width, R=4, A=16)
    pieces = sizes.walk_ranges(s)
    assert [walk for one in pieces for walk in range(one.first, one.end)] == list(range(s.walks))
    assert {one.walks for one in pieces[:-1]} <= {pieces[0].walks}
    assert 1 <= len(pieces) <= sizes.MOST_RANGES
    assert all(4 * heads * one.first % ALIGNMENT == 0 for one in pieces)
    blocks = blocks_at_once(state * width)
    assert sum(-(-one.walks * heads // blocks) for one in pieces) <= -(-s.walks * heads // blocks)


def test_a_piece_of_the_whole_model_of_the_receipts_is_a_quarter():
    s = ScanShape(B=4, S=4096, L=1024, H=64, G=1, N=64, P=64, R=4, A=16)
    assert [one.walks for one in sizes.walk_ranges(s)] == [4, 4, 4, 4]
