"""States in and out of the CUDA lane, its kernels interpreted on a CPU without rounding: against the reference lane,
and pieces of a row against the whole.
"""

import random
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import pytest
import torch

pytest.importorskip("tilelang")

from ablate.kernels.mamba3_mimo import ScanInputs, ScanResult, mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import scan as host
from ablate.kernels.mamba3_mimo.cuda.host.compiled import READS_START, program
from ablate.kernels.mamba3_mimo.cuda.host.final_state import RowEnd
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from ablate.kernels.mamba3_mimo.state import entered, left_behind
from tests.kernels import tile_interpreter
from tests.kernels.states import chained, double_inputs, random_state, results
from tests.kernels.test_mamba3_cuda_on_cpu import LIMIT, Interpreted, error
from tests.scan_inputs import ScanSizes

SMALL = {"batch": 1, "length": 45, "heads": 1, "groups": 1, "state": 32, "width": 32, "ranks": 2}
SWITCHES = {"chunk_size": 16, "superchunk": 32}
CASES = {
    "cumulated_angles": {"cumulated": True, "starts": (40,), "shape": {"heads": 2}},
    "sequential_cumulated_ungated": {
        "cumulated": True, "switches": {"schedule": "sequential"}, "without": ("z", "zeta", "D"),
    },
    "shared_angles_documents": {"shared": True, "shape": {"length": 81, "heads": 2}, "starts": (20, 33, 64)},
    "documents_at_the_end": {"starts": (1, 43, 44), "switches": {"schedule": "sequential"}},
    "groups_full_rotary": {"shape": {"heads": 2, "groups": 2, "length": 20, "rope_fraction": 1.0}},
    "one_token_per_rank": {"shape": {"length": 1}, "without": ("phi",), "switches": {"superchunk": 16}},
    "halved_heads": {
        "shape": {"state": 64, "width": 128, "ranks": 1, "length": 70}, "starts": (9,),
        "switches": {"chunk_size": 64, "superchunk": 64},
    },
    "lifted_sequential_psiv": {
        "shape": {"state": 64, "width": 64, "ranks": 4, "length": 20},
        "switches": {"schedule": "sequential", "psiv_cache": True},
    },
}  # fmt: skip


@lru_cache
def remembered(name, shape, variant):
    return program(name, shape, variant)


class Remembering(Interpreted):
    """Makes every program once: pieces of a row share theirs, which are for any batch and length."""

    def run(self, name, *arguments):
        tile_interpreter.run(remembered(name, replace(self.shape, B=0, S=0), self.variant), *arguments)


class _InterpretedScan(torch.autograd.Function):
    """The lane's host code and interpreted kernels as one differentiable function."""

    @staticmethod
    def forward(ctx, inputs, variant, *tensors):
        ctx.scan = Remembering(inputs.with_tensors(tensors), variant)
        out, ctx.final, ctx.saved = ctx.scan.forward(return_final_state=True)
        ctx.set_materialize_grads(False)
        ctx.nothing = torch.zeros_like(out)
        return out, ctx.final.clone()

    @staticmethod
    def backward(ctx, grad_out, grad_final):
        beyond = None if grad_final is None else RowEnd(ctx.final, grad_final)
        grads = ctx.scan.backward(ctx.nothing if grad_out is None else grad_out, ctx.saved, beyond)
        return None, None, *(grads[name] for name in ctx.scan.names)


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


def assert_near(actual, expected):
    assert set(actual) == set(expected)
    off = {name: error(actual[name], value) for name, value in expected.items() if value.abs().max() > 1e-12}
    assert {name: share for name, share in off.items() if not share < LIMIT} == {}
    nothing = {name: actual[name] for name in expected if name not in off}  # gradients that vanish
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
@pytest.mark.parametrize("seed", range(2))
def test_pieces_of_a_row_equal_the_whole(seed):
    draw = random.Random(seed)  # noqa: S311 - problems, not secrets
    *cuts, length = accumulate(draw.randint(17, 32) for _ in range(2))
    inputs, _ = problem({"length": length}, shared=seed == 1, seed=seed, starts=(draw.randint(1, length - 1),))
    scan = lane(schedule=("chunk_parallel", "sequential")[seed])
    before = float32_state(inputs, seed)
    pieces = results(inputs, before, lambda given, state: chained(given, cuts, scan, state))
    assert_near(pieces, results(inputs, before, reference))


def test_an_initial_state_changes_only_the_kernels_that_read_it():
    assert set(READS_START) == {"gradients", "time_gradients"}
    shape = ScanShape(B=1, S=64, H=1, G=1, N=32, P=32, R=2, A=16, C=16, L=32)
    names = ("reduce_heads", "sum_weights", "sum_heads", "time_gradients")  # B4 to B6
    texts = [[program(n, replace(shape, started=s), Variant(**SWITCHES)).script() for n in names] for s in (0, 1)]
    assert {name for name, without, started in zip(names, *texts, strict=True) if started != without} == {
        "time_gradients"
    }
