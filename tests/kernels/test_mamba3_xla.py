"""Lane xla against the float64 oracle and the reference lane, with XLA on this machine's processors.

Runs in the environment of `make tpu` (`make test-tpu`) and is skipped elsewhere. Tolerances are those of
test_mamba3_mimo.py: float64 1e-9 (sums in another order than the oracle's), float32 2e-4 for every time row, bfloat16
3e-2 over a tensor and 5e-2 for a row.
"""

import random
from dataclasses import replace

import pytest
import torch

from tests.xla_environment import DEVICE  # isort: skip - it decides about the device before torch_xla is imported

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import ScanInputs, ScanResult, ScanState, mamba3_mimo
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from ablate.kernels.xla import device as xla_device
from tests.kernels.oracle import NAMES, Oracle
from tests.kernels.states import chained, random_state, results
from tests.kernels.test_mamba3_mimo import BASE, assert_rows_close, document_ids, with_zero_steps
from tests.scan_inputs import TIME_AXIS, ScanSizes, global_error, random_inputs, worst_row_error

pytestmark = pytest.mark.timeout(900)  # XLA compiles for half a minute on a busy machine

FORMS = {
    "parallel": {"chunk_size": 16},
    "parallel_cached": {"chunk_size": 8, "psiv_cache": True},
    "parallel_remat": {"chunk_size": 32, "remat": True},
    "sequential": {"schedule": "sequential", "chunk_size": 8},
    "sequential_all": {"schedule": "sequential", "chunk_size": 16, "psiv_cache": True, "remat": True},
}


def on_xla(inputs: ScanInputs) -> ScanInputs:
    """Return leaves on the XLA device."""
    moved = replace(inputs, **{name: getattr(inputs, name).to(DEVICE) for name in inputs.names})
    for tensor in moved.tensors():
        tensor.requires_grad_()
    ids = None if inputs.segment_ids is None else inputs.segment_ids.to(DEVICE)
    return replace(moved, segment_ids=ids)


def run_lane(inputs: ScanInputs, grad_out, **form):
    """Return output, final state and gradients on the host, by name."""
    moved = on_xla(inputs)
    result = mamba3_mimo(moved, ScanSwitches(lane=Lane.XLA, **form), return_final_state=True)
    grads = torch.autograd.grad(result.out, moved.tensors(), grad_out.to(DEVICE))
    named = {
        **dict(zip(moved.names, grads, strict=True)),
        "out": result.out.detach(),
        "final_state": result.final_state.state.detach(),
    }
    xla_device.step_boundary()
    return {name: tensor.cpu() for name, tensor in named.items()}


def run_reference(inputs: ScanInputs, grad_out):
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs.tensors())
    result = mamba3_mimo(inputs.with_tensors(leaves), ScanSwitches(schedule="sequential"), return_final_state=True)
    grads = torch.autograd.grad(result.out, leaves, grad_out)
    return {
        **dict(zip(inputs.names, grads, strict=True)),
        "out": result.out.detach(),
        "final_state": result.final_state.state.detach(),
    }


def run_oracle(inputs: ScanInputs, grad_out):
    values = {name: getattr(inputs, name).double().numpy() for name in NAMES}
    ids = None if inputs.segment_ids is None else inputs.segment_ids.numpy()
    oracle = Oracle(values, ids, inputs.angles_cumulated)
    outputs = {"out": oracle.out, "final_state": oracle.final_state} | oracle.gradients(grad_out.double().numpy())
    return {name: torch.from_numpy(value) for name, value in outputs.items()}


def problem(shape: ScanSizes, *, dtype=torch.float32, ids=None, seed=1, **fields) -> ScanInputs:
    inputs = random_inputs(shape, seed=seed, dtype=dtype)
    if dtype == torch.float64:
        inputs = inputs.with_tensors(tuple(t.double() for t in inputs.tensors()))
    return replace(inputs, segment_ids=ids, **fields)


def grad_for(inputs: ScanInputs) -> torch.Tensor:
    batch, length, heads, width = inputs.v.shape
    ranks = [inputs.psi.shape[1]] if inputs.phi is None else []
    return torch.randn(batch, length, *ranks, heads, width, generator=torch.Generator().manual_seed(2)).to(
        inputs.v.dtype
    )


def drawn(seed: int) -> tuple[ScanInputs, dict]:
    """Return a random problem in float64 over the whole range of the lane, and how to run it."""
    draw = random.Random(seed)  # noqa: S311 - problems, not secrets
    groups, ranks, chunk = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 8]), draw.choice([8, 16, 32, 64])
    shape = ScanSizes(
        batch=draw.choice([1, 2, 3]),
        length=draw.choice([1, 2, chunk - 1, chunk, chunk + 1, 3 * chunk - 2, draw.randint(3, 130)]),
        heads=groups * draw.choice([1, 2]),
        groups=groups,
        state=draw.choice([4, 8, 12, 32]),
        width=draw.choice([1, 4, 9, 16]),
        ranks=ranks,
        rope_fraction=draw.choice([0.5, 1.0]),
    )
    generator = torch.Generator().manual_seed(seed)
    ids = None
    if draw.random() < 0.75:
        changes = torch.rand(shape.batch, shape.length, generator=generator) < draw.choice([0.03, 0.2, 1.0])
        ids = changes.cumsum(1) % draw.choice([2, 1000])
    missing = [name for name in ("D", "phi") if draw.random() < 0.25]
    missing += ["z", "zeta"] if draw.random() < 0.25 else []
    inputs = problem(shape, dtype=torch.float64, ids=ids, seed=seed, **dict.fromkeys(missing))
    inputs = replace(inputs, angles_cumulated=draw.random() < 0.2)
    if not inputs.angles_cumulated and draw.random() < 0.5:
        inputs = replace(inputs, angles=inputs.angles[:, :, :1].clone())
    form = {
        "schedule": draw.choice(["sequential", "chunk_parallel"]),
        "chunk_size": chunk,
        "psiv_cache": draw.random() < 0.5,
        "remat": draw.random() < 0.5,
    }
    if draw.random() < 0.5:
        inputs = with_zero_steps(inputs, draw.choice([0.5, 1.0]), generator)
    return inputs, form


@pytest.mark.parametrize("seed", range(14))
def test_random_problem_matches_the_recurrence(seed):
    inputs, form = drawn(seed)
    grad_out = grad_for(inputs)
    whole = set(inputs.names) == set(NAMES) and inputs.angles.shape[2] == inputs.v.shape[2]
    expected = (run_oracle if whole else run_reference)(inputs, grad_out)
    assert_rows_close(run_lane(inputs, grad_out, **form), expected, 1e-9)


def there_and_back(**form):
    """Return the scan of tensors on the host by the lane, with states in and out."""

    def scan(inputs, before):
        moved = inputs.with_tensors(tuple(tensor.to(DEVICE) for tensor in inputs.tensors()))
        ids = None if inputs.segment_ids is None else inputs.segment_ids.to(DEVICE)
        state = ScanState(*(None if t is None else t.to(DEVICE) for t in before))
        switches = ScanSwitches(lane=Lane.XLA, **form)
        result = mamba3_mimo(replace(moved, segment_ids=ids), switches, initial_state=state, return_final_state=True)
        final = ScanState(*(None if t is None else t.cpu() for t in result.final_state))
        return ScanResult(result.out.cpu(), final)

    return scan


@pytest.mark.parametrize("form", [FORMS["parallel"], FORMS["sequential"]], ids=["parallel", "sequential"])
@pytest.mark.parametrize("cumulated", [False, True], ids=["raw_angles", "cumulated_angles"])
def test_states_and_pieces_of_a_row_match_the_reference(form, cumulated):
    inputs = problem(BASE, dtype=torch.float64, ids=document_ids(BASE, "several"), angles_cumulated=cumulated)
    before = random_state(inputs, seed=3, same_document=(True, False))

    def reference(given, state):
        return mamba3_mimo(given, initial_state=state, return_final_state=True)

    def pieces(given, state):
        return chained(given, (19,), there_and_back(**form), state)

    assert_rows_close(results(inputs, before, pieces), results(inputs, before, reference), 1e-9)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_float32_matches_oracle(form):
    inputs = problem(BASE, ids=document_ids(BASE, "several"))
    grad_out = grad_for(inputs)
    assert_rows_close(run_lane(inputs, grad_out, **form), run_oracle(inputs, grad_out), 2e-4)


@pytest.mark.parametrize("form", [FORMS["parallel"], FORMS["sequential"]], ids=["parallel", "sequential"])
def test_bfloat16_matches_oracle(form):
    inputs = problem(BASE, dtype=torch.bfloat16, ids=document_ids(BASE, "returning_id"))
    grad_out = grad_for(inputs)
    actual, expected = run_lane(inputs, grad_out, **form), run_oracle(inputs, grad_out)
    assert actual["out"].dtype == torch.bfloat16
    assert actual["final_state"].dtype == torch.float32
    for name, value in actual.items():
        assert global_error(value, expected[name]) < 3e-2, name
        if name in TIME_AXIS:
            assert worst_row_error(value, expected[name], time_axis=TIME_AXIS[name], floor=1.0) < 5e-2, name


def test_long_decay_does_not_overflow():
    inputs = problem(BASE)
    inputs = replace(inputs, adt=inputs.adt * 200)
    assert all(value.isfinite().all() for value in run_lane(inputs, grad_for(inputs), chunk_size=16).values())


def test_no_gradient_is_returned_for_frozen_inputs():
    moved = problem(BASE)
    moved = moved.with_tensors(tuple(tensor.to(DEVICE) for tensor in moved.tensors()))
    moved.v.requires_grad_()
    for form in ({"chunk_size": 16}, {"chunk_size": 16, "schedule": "sequential"}):
        moved.v.grad = None
        mamba3_mimo(moved, ScanSwitches(lane=Lane.XLA, **form)).out.sum().backward()
        assert moved.v.grad is not None
        assert moved.psi.grad is None


@pytest.mark.parametrize("schedule", ["chunk_parallel", "sequential"])
@pytest.mark.parametrize("psiv_cache", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_facts_tell_what_the_graphs_do(schedule, psiv_cache, remat):
    moved = on_xla(problem(BASE))
    switches = ScanSwitches(lane=Lane.XLA, schedule=schedule, psiv_cache=psiv_cache, remat=remat, chunk_size=8)
    with facts.collect() as seen:
        mamba3_mimo(moved, switches)
    xla_device.forget_pending()
    assert seen[ScanFact.LANE] == "xla"
    assert seen[ScanFact.SCHEDULE] == schedule
    assert seen[ScanFact.CHUNK_SIZE] == 8
    assert seen[ScanFact.DTYPE] == "float32"
    assert seen[ScanFact.REMAT] is remat
    assert (ScanFact.PSIV_SAVED_BYTES in seen) is psiv_cache
    assert (ScanFact.PSIV_RECOMPUTES in seen) is not psiv_cache
    if psiv_cache:
        assert seen[ScanFact.PSIV_SAVED_BYTES] == 2 * 4 * 40 * 4 * 8 * 4  # B, H, padded S, R, P, float32


def graph_of(inputs: ScanInputs, **form) -> str:
    result = mamba3_mimo(inputs, ScanSwitches(lane=Lane.XLA, chunk_size=16, **form))
    grads = torch.autograd.grad(result.out.sum(), inputs.tensors())
    digest = xla_device._xlac()._get_graph_hash([result.out, *grads]).hex()
    xla_device.forget_pending()
    return digest


def of_documents(moved: ScanInputs, kind: str) -> ScanInputs:
    return replace(moved, segment_ids=document_ids(BASE, kind).to(DEVICE))


@pytest.mark.parametrize("form", [{}, {"schedule": "sequential"}], ids=["parallel", "sequential"])
def test_other_documents_are_the_same_graph(form):
    moved = on_xla(problem(BASE, ids=document_ids(BASE, "several")))
    xla_device.step_boundary()
    hashes = {graph_of(of_documents(moved, kind), **form) for kind in ("several", "returning_id", "every_token")}
    assert len(hashes) == 1


def test_boundaries_as_numbers_are_another_graph_each():
    moved = on_xla(problem(BASE))
    xla_device.step_boundary()
    hashes = set()
    for cut in (5, 16, 30):
        ids = torch.zeros(BASE.batch, BASE.length, dtype=torch.long, device=DEVICE)
        ids[:, cut:] = 1
        hashes.add(graph_of(replace(moved, segment_ids=ids)))
    assert len(hashes) == 3
