"""States in and out of the reference lane: against the oracle, and pieces of a row against the whole."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ablate.kernels.errors import KernelUnsupported, ShapeError
from ablate.kernels.mamba3_mimo import ScanState, mamba3_mimo, peer
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.oracle import NAMES, Oracle
from tests.kernels.problem import Case, make_inputs
from tests.kernels.states import chained, double_inputs, piece, random_state, results
from tests.scan_inputs import ScanSizes

FORMS = {"sequential": ScanSwitches(schedule="sequential"), "C8": ScanSwitches(chunk_size=8), "C16": ScanSwitches()}
SHAPE = ScanSizes(batch=2, length=29, heads=4, groups=2, state=16, width=8, ranks=2)
IDS = torch.tensor([[4] * 9 + [2] * 20, [7] * 16 + [1] + [7] * 12])


def lane(switches):
    return lambda inputs, before: mamba3_mimo(inputs, switches, initial_state=before, return_final_state=True)


def oracle_results(inputs, before, weights):
    """Return outputs and gradients by the oracle; `weights` are the gradients of o and of the final state."""
    values = {name: getattr(inputs, name).numpy() for name in NAMES}
    ids = inputs.segment_ids
    goes_on = np.ones(2, bool) if before.segment_ids is None else (ids[:, 0] == before.segment_ids).numpy()
    entered = {"state": before.state.numpy(), "write": before.write.numpy(), "goes_on": goes_on}
    oracle = Oracle(values, None if ids is None else ids.numpy(), inputs.angles_cumulated, entered)
    outputs = {"out": oracle.out, "final_state": oracle.final_state, "final_write": oracle.final_write}
    return outputs | oracle.gradients(*weights)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("cumulated", [False, True], ids=["raw_angles", "cumulated_angles"])
@pytest.mark.parametrize("documents", [None, (True, False)], ids=["one_document", "documents"])
def test_states_and_their_gradients_match_the_oracle(form, cumulated, documents):
    inputs = double_inputs(SHAPE, seed=1, angles_cumulated=cumulated, segment_ids=IDS if documents else None)
    before = random_state(inputs, seed=2, same_document=documents)
    leaves = [t.detach().requires_grad_() for t in (*inputs.tensors(), *before[:2])]
    entered = ScanState(*leaves[-2:], before.segment_ids)
    out, final = lane(form)(inputs.with_tensors(tuple(leaves[:-2])), entered)
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(3)).double() for t in (out, final.state)]
    grads = torch.autograd.grad([out, final.state], leaves, weights)
    actual = {"out": out, "final_state": final.state, "final_write": final.write}
    actual |= dict(zip([*inputs.names, "state", "write"], grads, strict=True))
    expected = oracle_results(inputs, before, [weight.numpy() for weight in weights])
    assert set(actual) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].detach(), torch.from_numpy(value), rtol=1e-9, atol=1e-11, msg=name)
    if documents:
        assert not actual["state"][1].any()
        assert not actual["write"][1].any()


def test_gradient_of_the_last_write_matches_central_differences():
    """The oracle has no adjoint of the last write; here it has a gradient of its own, apart from everything else."""
    inputs = double_inputs(replace(SHAPE, length=2, batch=1, heads=1, groups=1, state=4, width=2), seed=4)

    def last_write(*tensors):
        return mamba3_mimo(inputs.with_tensors(tensors), return_final_state=True).final_state.write

    assert torch.autograd.gradcheck(last_write, [t.requires_grad_() for t in inputs.tensors()], atol=1e-7)


def drawn(seed):
    """Return a random problem over the whole range, what its rows go on from, and where they are cut."""
    draw = random.Random(seed)  # noqa: S311 - problems, not secrets
    groups = draw.choice([1, 2])
    shape = ScanSizes(
        batch=draw.choice([1, 2, 3]), length=draw.choice([4, 17, 32, draw.randint(5, 60)]),
        heads=groups * draw.choice([1, 2]), groups=groups, state=draw.choice([4, 8, 12]), width=draw.choice([1, 4]),
        ranks=draw.choice([1, 2, 4]), rope_fraction=draw.choice([0.5, 1.0]),
    )  # fmt: skip
    missing = [name for name in ("D", "phi") if draw.random() < 0.25] + ["z", "zeta"] * (draw.random() < 0.25)
    inputs = double_inputs(shape, seed=seed, angles_cumulated=draw.random() < 0.25, **dict.fromkeys(missing))
    if not inputs.angles_cumulated and draw.random() < 0.4:
        inputs = replace(inputs, angles=inputs.angles[:, :, :1].clone())
    if draw.random() < 0.7:
        gen = torch.Generator().manual_seed(seed)
        changes = torch.rand(shape.batch, shape.length, generator=gen) < draw.choice([0.05, 0.3, 1.0])
        inputs = replace(inputs, segment_ids=changes.cumsum(1) % draw.choice([2, 1000]))
    before = None
    if draw.random() < 0.7:
        before = random_state(inputs, seed=seed, same_document=[draw.random() < 0.7 for _ in range(shape.batch)])
    cuts = sorted(draw.sample(range(1, shape.length), draw.randint(1, 3)))
    return inputs, before, cuts, ScanSwitches(
        schedule=draw.choice(["sequential", "chunk_parallel"]), chunk_size=draw.choice([8, 16]),
        psiv_cache=draw.random() < 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_a_row_equal_the_whole(seed):
    inputs, before, cuts, switches = drawn(seed)
    whole = results(inputs, before, lane(switches))
    pieces = results(inputs, before, lambda given, state: chained(given, cuts, lane(switches), state))
    for name, value in whole.items():
        torch.testing.assert_close(
            pieces[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("tokens", [1, 5])
def test_decoding_token_by_token_equals_the_whole_row(tokens):
    inputs = double_inputs(SHAPE, seed=3, segment_ids=IDS)
    whole, step = mamba3_mimo(inputs, return_final_state=True), lane(FORMS["sequential"])
    pieces = chained(inputs, range(14, 29, tokens), step)
    torch.testing.assert_close(pieces.out, whole.out, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(pieces.final_state, whole.final_state, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_piece_with_ids_that_does_not_go_on_begins_with_nothing():
    inputs = double_inputs(SHAPE, segment_ids=IDS)
    before = random_state(inputs, seed=1, same_document=(False, False))
    torch.testing.assert_close(lane(ScanSwitches())(inputs, before).out, mamba3_mimo(inputs).out, rtol=0, atol=0)


def test_truncated_backpropagation_stops_where_the_state_is_detached():
    inputs = double_inputs(SHAPE)
    for tensor in inputs.tensors():
        tensor.requires_grad_()
    first = mamba3_mimo(piece(inputs, 0, 20), return_final_state=True).final_state
    mamba3_mimo(piece(inputs, 20, 29), initial_state=first.detached()).out.sum().backward()
    assert not inputs.v.grad[:, :20].any()
    assert inputs.v.grad[:, 20:].any()


def test_the_final_state_has_the_documented_shapes_and_dtypes_and_is_there_only_if_asked_for():
    inputs = make_inputs(Case(S=20, H=4, N=16, P=8, R=2), "cpu")
    state, write, ids = mamba3_mimo(replace(inputs, segment_ids=torch.ones(2, 20).long()), return_final_state=True)[1]
    assert [(tuple(t.shape), t.dtype) for t in (state, write)] == [((2, 4, 16, 8), torch.float32)] * 2
    assert ids.tolist() == [1, 1]
    assert mamba3_mimo(inputs).final_state is None


def one_row(t):
    return t[:1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s._replace(state=one_row(s.state)), r"initial_state.state has shape \[1, 4, 16, 8\]; expected \[2,"),
        (lambda s: s._replace(write=one_row(s.write)), r"initial_state.write has shape"),
        (
            lambda s: s._replace(segment_ids=torch.zeros(3)),
            r"initial_state.segment_ids has shape \[3\]; expected \[2\]",
        ),
        (lambda s: s._replace(segment_ids=torch.zeros(2)), "initial_state has segment_ids and the inputs have none"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, reason):
    inputs = double_inputs(SHAPE)
    with pytest.raises(ShapeError, match=reason):
        mamba3_mimo(inputs, initial_state=change(random_state(inputs, seed=0)))


def test_a_state_beside_an_entering_one_is_refused():
    inputs = double_inputs(SHAPE)
    state = random_state(inputs, seed=0)
    with pytest.raises(ShapeError, match="initial_state and the inputs' entering are both present"):
        mamba3_mimo(replace(inputs, entering=state.state), initial_state=state)
    with pytest.raises(ShapeError, match=r"entering has shape \[2, 4, 8, 16\]; expected \[2, 4, 16, 8\]"):
        replace(inputs, entering=state.state.mT)


def test_the_official_kernels_refuse_an_initial_state_and_the_gradient_of_a_final_one(monkeypatch):
    inputs = make_inputs(Case(S=32, H=4, N=32, P=32, R=2), "cpu")
    official = peer.Official(function=lambda **t: (t["V"] * 1, None, torch.zeros(2, 4, 32, 32)), release="")
    monkeypatch.setattr(peer, "official", lambda: official)
    with pytest.raises(KernelUnsupported, match="lane 'peer': an initial state enters; allowed: none"):
        peer.peer_scan(replace(inputs, entering=torch.zeros(2, 4, 32, 32)), chunk_size=16)
    inputs.v.requires_grad_()
    out, state = peer.peer_scan(inputs, chunk_size=16, return_final_state=True)
    out.float().sum().backward(retain_graph=True)
    with pytest.raises(KernelUnsupported, match="no gradient of the final state"):
        state.sum().backward()
