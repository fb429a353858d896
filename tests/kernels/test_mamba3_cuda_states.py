"""States in and out of the CUDA lane, its kernels interpreted on a CPU without rounding: against the reference lane,
and pieces of a row against the whole.
"""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tilelang")

from kernels.mamba3_mimo import ScanInputs, ScanResult, mamba3_mimo
from kernels.mamba3_mimo.cuda.host import scan as host
from kernels.mamba3_mimo.cuda.host.compiled import KERNELS
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.state import entered, left_behind
from tests.kernels.states import chained, double_inputs, random_state, results
from tests.kernels.test_mamba3_cuda_on_cpu import LIMIT, Interpreted, error
from tests.scan_inputs import ScanSizes

SMALL = {"batch": 1, "length": 57, "heads": 2, "groups": 1, "state": 32, "width": 32, "ranks": 2}
SWITCHES = {"chunk_size": 16, "superchunk": 32}
CASES = {
    "raw_angles": {},
    "sequential": {"switches": {"schedule": "sequential"}},
    "cumulated_angles": {"cumulated": True, "starts": (40,)},
    "sequential_cumulated": {"cumulated": True, "switches": {"schedule": "sequential"}},
    "shared_angles_documents": {"shared": True, "shape": {"length": 131}, "starts": (20, 33, 64)},
    "documents_at_the_end": {"starts": (1, 55, 56), "switches": {"schedule": "sequential"}},
    "groups_full_rotary": {"shape": {"batch": 2, "heads": 4, "groups": 2, "length": 40, "rope_fraction": 1.0}},
    "one_token": {"shape": {"length": 1}},
    "one_token_sequential": {"shape": {"length": 1}, "switches": {"schedule": "sequential"}},
    "ungated": {"without": ("z", "zeta")},
    "per_rank": {"without": ("phi", "D"), "switches": {"schedule": "sequential"}},
    "halved_heads": {
        "shape": {"state": 64, "width": 128, "ranks": 1, "heads": 1, "length": 70}, "starts": (9,),
        "switches": {"chunk_size": 64, "superchunk": 64},
    },
    "halved_heads_sequential": {
        "shape": {"state": 64, "width": 128, "ranks": 1, "heads": 1, "length": 70},
        "switches": {"chunk_size": 64, "schedule": "sequential"},
    },
    "lifted": {"shape": {"state": 64, "width": 64, "ranks": 4, "heads": 1, "length": 40}},
    "lifted_sequential_psiv": {
        "shape": {"state": 64, "width": 64, "ranks": 4, "heads": 1, "length": 40},
        "switches": {"schedule": "sequential", "psiv_cache": True},
    },
}  # fmt: skip


class _InterpretedScan(torch.autograd.Function):
    """The lane's host code and interpreted kernels as one differentiable function."""

    @staticmethod
    def forward(ctx, inputs, variant, *tensors):
        ctx.scan = Interpreted(inputs.with_tensors(tensors), variant)
        out, ctx.final, ctx.saved = ctx.scan.forward(return_final_state=True)
        ctx.set_materialize_grads(False)
        ctx.nothing = torch.zeros_like(out)
        return out, ctx.final.clone()

    @staticmethod
    def backward(ctx, grad_out, grad_final):
        beyond = None if grad_final is None else host.Beyond(ctx.final, grad_final)
        grads = ctx.scan.backward(ctx.nothing if grad_out is None else grad_out, ctx.saved, beyond)
        return None, None, *(grads[name] for name in ctx.scan.given)


def lane(**switches):
    """Return the scan by interpreted kernels."""
    variant = Variant(**SWITCHES | switches)

    def scan(inputs: ScanInputs, before) -> ScanResult:
        inputs = inputs if before is None else entered(inputs, before)
        out, state = _InterpretedScan.apply(inputs, variant, *inputs.tensors())
        return ScanResult(out, left_behind(inputs, state))

    return scan


def reference(inputs, before):
    return mamba3_mimo(inputs, initial_state=before, return_final_state=True)


@pytest.fixture(autouse=True)
def kernels_inputs_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(host, "NARROW", ())


def assert_near(found, expected):
    assert set(found) == set(expected)
    off = {name: error(found[name], value) for name, value in expected.items() if value.abs().max() > 1e-12}
    assert {name: share for name, share in off.items() if not share < LIMIT} == {}
    nothing = {name: found[name] for name in expected if name not in off}  # gradients that vanish
    assert {name: float(value.abs().max()) for name, value in nothing.items() if not value.abs().max() < 1e-6} == {}


def problem(shape=None, *, switches=None, starts=(), without=(), cumulated=False, shared=False, seed=1):
    sizes = ScanSizes(**SMALL | (shape or {}))
    inputs = double_inputs(sizes, seed=seed, angles_cumulated=cumulated, **dict.fromkeys(without))
    if shared:
        inputs = replace(inputs, angles=inputs.angles[:, :, :1].clone())
    if starts:
        at = torch.arange(sizes.length)
        inputs = replace(inputs, segment_ids=sum(at >= start for start in starts).expand(sizes.batch, -1))
    inputs = inputs.with_tensors(tuple(t.float().double() for t in inputs.tensors()))
    return inputs, switches or {}


def float32_state(inputs, seed):
    state = random_state(inputs, seed=seed)
    return state._replace(state=state.state.float().double(), write=state.write.float().double())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_take_and_give_states_as_the_reference_does(name):
    inputs, switches = problem(**CASES[name])
    before = float32_state(inputs, 2)
    assert_near(results(inputs, before, lane(**switches)), results(inputs, before, reference))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["chunk_parallel", "sequential"])
def test_a_final_state_alone_has_gradients(schedule):
    inputs, _ = problem(starts=(30,))
    found = []
    for scan in (lane(schedule=schedule), reference):
        leaves = inputs.with_tensors(tuple(t.detach().requires_grad_() for t in inputs.tensors()))
        state = scan(leaves, None).final_state.state
        weight = torch.randn(state.shape, generator=torch.Generator().manual_seed(1)).double()
        names = [name for name in leaves.names if name not in {"q", "z", "zeta", "phi", "D", "q_bias"}]
        grads = torch.autograd.grad(state, [getattr(leaves, name) for name in names], weight, allow_unused=True)
        found.append(dict(zip(names, grads, strict=True)) | {"state": state.detach()})
    assert_near(*found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_a_row_equal_the_whole(seed):
    draw = random.Random(seed)  # noqa: S311 - problems, not secrets
    inputs, _ = problem(
        {"length": draw.randint(50, 90)}, cumulated=seed == 1, shared=seed == 2, seed=seed,
        starts=sorted(draw.sample(range(1, 50), 2)) if seed != 3 else (),
    )  # fmt: skip
    scan = lane(schedule=draw.choice(["chunk_parallel", "sequential"]))
    cuts = sorted(draw.sample(range(1, inputs.v.shape[1]), draw.randint(1, 3)))
    before = float32_state(inputs, seed)
    pieces = results(inputs, before, lambda given, state: chained(given, cuts, scan, state))
    assert_near(pieces, results(inputs, before, scan))
    assert_near(pieces, results(inputs, before, reference))


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in {"gradients", "time_gradients"}])
def test_a_state_changes_no_other_program(name):
    shape = ScanShape(B=1, S=64, H=2, G=1, N=32, P=32, R=2, A=16, C=16, L=32)
    started, without = (
        KERNELS[name](replace(shape, started=started), Variant(**SWITCHES), 64).script() for started in (True, False)
    )
    assert started == without
