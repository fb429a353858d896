"""The CUDA lane as torch operators: traced without a graph break, attested, and equal to the reference lane.

Eager calls, which take none: see test_mamba3_cuda_eager.py.
"""

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

pytest.importorskip("tilelang")

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported, ShapeError
from ablate.kernels.mamba3_mimo import DIFFERENTIABLE, ScanInputs, mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import op, scan
from ablate.kernels.mamba3_mimo.cuda.host.op import needs_dispatcher
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.checked import ours
from tests.kernels.host_time import Watching, unlaunched
from tests.kernels.problem import Case, make_grad, make_inputs
from tests.kernels.scan_cases import each, scan_problem
from tests.kernels.states import piece
from tests.scan_inputs import ScanSizes, global_error, random_inputs

CUDA = ScanSwitches(lane=Lane.CUDA)
SHAPE = ScanSizes(batch=2, length=500, heads=4, groups=2, state=64, width=64, ranks=4)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns about its own parts
]


@pytest.fixture(autouse=True)
def nan_filled_buffers():
    """Replace the folder's fixture: the operators run inside compiled graphs here."""
    return


def trained_inputs(device: str = "cpu", shape: ScanSizes = SHAPE) -> ScanInputs:
    inputs = random_inputs(shape, dtype=torch.bfloat16)
    return inputs.with_tensors(tuple(t.to(device).requires_grad_() for t in inputs.tensors()))


def small_model(inputs: ScanInputs, q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Elementwise work before and after the scan."""
    return mamba3_mimo(inputs.with_tensors((q * 2, *rest)), CUDA).out.float().square().mean()


@pytest.mark.filterwarnings("ignore")
def test_compile_takes_forward_and_backward_without_a_graph_break():
    seen: list[list[str]] = []

    def keep(graph, _examples):
        seen.append([str(node.target) for node in graph.graph.nodes if "mamba3_scan" in str(node.target)])
        return graph.forward

    inputs = trained_inputs()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    with pytest.raises(KernelUnsupported, match="no implementation on node class 'cpu'"):
        torch.compile(small_model, fullgraph=True, backend=backend)(inputs, *inputs.tensors())
    assert seen[0] == ["ablate.mamba3_scan.default"]


@pytest.mark.filterwarnings("ignore")
def test_compile_leaves_sizes_open_without_failing():
    """A second state size in one process makes torch trace with symbols instead of numbers."""
    compiled = torch.compile(
        small_model, fullgraph=True, backend=aot_autograd(fw_compiler=lambda graph, _: graph.forward)
    )
    for shape in (SHAPE, replace(SHAPE, state=128), replace(SHAPE, state=128, ranks=2), replace(SHAPE, heads=8)):
        inputs = trained_inputs(shape=shape)
        with pytest.raises(KernelUnsupported, match="no implementation on node class 'cpu'"):
            compiled(inputs, *inputs.tensors())


@pytest.mark.filterwarnings("ignore")
def test_compiled_passes_run_both_operators():
    """On CPU tensors, with kernels that do nothing: what comes back has the shapes, not the values."""
    seen: list[str] = []

    def keep(graph, _examples):
        seen.extend(str(node.target) for node in graph.graph.nodes if "mamba3_scan" in str(node.target))
        return graph.forward

    inputs = trained_inputs()
    with unlaunched():
        compiled = torch.compile(small_model, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
        grads = torch.autograd.grad(compiled(inputs, *inputs.tensors()), inputs.tensors())
    assert seen == ["ablate.mamba3_scan.default", "ablate.mamba3_scan_backward.default"]
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in inputs.tensors()]


@pytest.mark.parametrize("missing", [(), ("D",), ("z", "zeta"), ("phi",), ("states",)])
def test_operators_keep_torchs_rules_without_a_gpu(missing):
    inputs = trained_inputs(shape=replace(SHAPE, length=60))
    if "states" in missing:
        inputs = replace(inputs, entering=torch.randn(2, 4, 64, 64, requires_grad=True))
    given = [None if name in missing else getattr(inputs, name) for name in DIFFERENTIABLE]
    arguments = (*given, None, False, "states" in missing, *(getattr(CUDA, name) for name in op.SWITCHES))
    with unlaunched():
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.ablate.mamba3_scan, arguments, test_utils=tests)


FAKE = {
    "default": ({}, {}),
    "psiv_cache": ({"psiv_cache": True}, {}),
    "sequential": ({"schedule": "sequential"}, {}),
    "warp_specialize": ({"warp_specialize": True}, {}),
    "heads_in_turn": ({"heads_in_turn": 2}, {}),
    "documents": ({}, {"segment_ids": torch.arange(1000).view(2, 500) // 123}),
    "no_skip": ({}, {"D": None}),
    "no_gate": ({}, {"z": None, "zeta": None}),
    "per_rank": ({}, {"phi": None}),
    "cumulated": ({}, {"angles_cumulated": True}),
    "started": ({}, {"entering": torch.ones(2, 4, 64, 64)}),
    "started_sequential": ({"schedule": "sequential"}, {"entering": torch.ones(2, 4, 64, 64)}),
}


@pytest.mark.parametrize(("switches", "changes"), FAKE.values(), ids=FAKE)
def test_fake_kernels_give_shapes_and_dtypes_of_both_passes_without_aliases(switches, changes):
    assert_fake_passes(replace(trained_inputs(), **changes), switches)


@pytest.mark.parametrize("changes", [{}, {"phi": None}], ids=["default", "per_rank"])
def test_fake_kernels_of_halved_heads_give_the_shapes_of_whole_ones(changes):
    shape = replace(SHAPE, width=128, ranks=1)
    assert_fake_passes(replace(trained_inputs(shape=shape), **changes), {"chunk_size": 64})


def assert_fake_passes(inputs: ScanInputs, switches: dict[str, object]) -> None:
    plain = [t.detach() for t in inputs.tensors()]
    ids = inputs.segment_ids
    with FakeTensorMode() as mode:
        fake = inputs.with_tensors(tuple(mode.from_tensor(t).requires_grad_() for t in plain))
        fake = replace(fake, segment_ids=None if ids is None else mode.from_tensor(ids))
        asked = replace(CUDA, **switches)
        assert op.scan(fake, asked, False)[1] is None
        out, state = op.scan(fake, asked, True)
        grads = torch.autograd.grad(out.float().sum() + state.sum(), fake.tensors(), retain_graph=True)
        of_state = torch.autograd.grad(state.sum(), fake.tensors(), retain_graph=True)
        of_out = torch.autograd.grad(out.float().sum(), fake.tensors())
    batch, tokens, heads, width = inputs.v.shape
    ranks = (inputs.q.shape[2],) if inputs.phi is None else ()
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype) == ((batch, tokens, *ranks, heads, width), torch.bfloat16)
    assert (state.shape, state.dtype) == ((batch, heads, 64, width), torch.float32)
    for gradients in (grads, of_state, of_out):
        assert [(g.shape, g.dtype) for g in gradients] == [(t.shape, t.dtype) for t in inputs.tensors()]
    assert len({t.untyped_storage()._cdata for t in (out, state, *grads, *fake.tensors())}) == 2 + 2 * len(grads)


def nothing_is_compiled(*_: object) -> None:
    pytest.fail("compiled before it was refused")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict.fromkeys(("q", "k", "v", "z"), torch.float32), "q, k, v and z have dtype torch.float32; allowed"),
        (dict.fromkeys(("q", "k", "v", "z"), torch.float16), "q, k, v and z have dtype torch.float16; allowed"),
        ({"adt": torch.float64}, "adt has dtype torch.float64; allowed for lane 'cuda': torch.float32"),
        ({"D": torch.int32}, "D has dtype torch.int32; allowed for lane 'cuda': torch.float32"),
    ],
)
def test_what_the_kernels_would_round_is_refused(changes, reason, monkeypatch):
    monkeypatch.setattr(op, "build", nothing_is_compiled)
    inputs = trained_inputs()
    inputs = replace(inputs, **{name: getattr(inputs, name).detach().to(dtype) for name, dtype in changes.items()})
    with pytest.raises(KernelUnsupported, match=reason):
        op.scan(inputs, CUDA, False)


def test_another_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0) if index == 6 else (9, 0))
    refusal = str(op.refusal_on(torch.device("cuda", 6)))
    assert refusal.startswith("NVIDIA A100 has compute capability 8.0; allowed for lane 'cuda': 9.0")
    assert op.refusal_on(torch.device("cuda", 7)) is None
    op.refusal_on.cache_clear()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_another_gpu_is_refused_before_anything_is_compiled(direction, monkeypatch):
    monkeypatch.setattr(op, "refusal_on", lambda device: f"GPU {device.index} is another one")
    monkeypatch.setattr(op, "build", nothing_is_compiled)
    tensors = [SimpleNamespace(device=torch.device("cuda", 6)) for _ in DIFFERENTIABLE]
    with pytest.raises(KernelUnsupported, match="GPU 6 is another one"):
        op._Launched(direction, (*tensors, None), (False, False, *(getattr(CUDA, name) for name in op.SWITCHES)))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"ranks": 3}, "rank is 3; allowed: 1, 2, 4, 8"), ({"state": 48}, "state size is 48"), ({"width": 96}, "is 96")],
)
def test_sizes_that_no_kernel_has_are_refused_before_anything_is_compiled(sizes, reason, monkeypatch):
    inputs = trained_inputs(shape=replace(SHAPE, **sizes))
    with unlaunched():
        monkeypatch.setattr(op, "build", nothing_is_compiled)
        with pytest.raises(KernelUnsupported, match=reason):
            mamba3_mimo(inputs, CUDA)


@pytest.mark.parametrize(("sizes", "given"), [({"batch": 0}, "B=0"), ({"length": 0}, "S=0"), ({"heads": 0}, "H=0")])
def test_a_scan_of_nothing_is_an_error_that_says_what_is_zero(sizes, given):
    with pytest.raises(ShapeError, match=f"{given}.*; allowed: all at least 1"):
        trained_inputs(shape=replace(SHAPE, **sizes))


def test_both_passes_run_with_the_device_of_their_tensors_as_the_current_one(monkeypatch):
    current, seen = [], []

    @contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    inputs = trained_inputs(shape=replace(SHAPE, length=60))
    with unlaunched():
        monkeypatch.setattr(torch.cuda, "device_of", device_of)
        launches = defaultdict(
            lambda: (
                lambda *tensors: seen.append(
                    (list(current), {t.device for t in tensors if isinstance(t, torch.Tensor)})
                )
            )
        )
        monkeypatch.setattr(scan, "launches", lambda *_: launches)
        out = mamba3_mimo(inputs, CUDA).out
        forward = len(seen)
        torch.autograd.grad(out.float().sum(), inputs.tensors())
    assert 0 < forward < len(seen)
    assert current == []
    assert seen == [([inputs.v.device], {inputs.v.device})] * len(seen)


def run(inputs: ScanInputs, options: ScanSwitches) -> dict[str, torch.Tensor]:
    result = mamba3_mimo(inputs, options, return_final_state=True)
    grad_out = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(7)).to(result.out)
    grads = torch.autograd.grad(result.out, inputs.tensors(), grad_out)
    return {"out": result.out, "state": result.final_state.state} | dict(zip(inputs.names, grads, strict=True))


def scan_of(length: int = SHAPE.length, batch: int = SHAPE.batch, **changes: object) -> pytest.MarkDecorator:
    """Return the mark of tests that launch a scan of SHAPE, of another length or batch."""
    case = Case(B=batch, S=length, H=SHAPE.heads, G=SHAPE.groups, N=SHAPE.state, P=SHAPE.width, R=SHAPE.ranks)
    return pytest.mark.scans(scan_problem(replace(case, **changes)))


WITHOUT = [(), ("D",), ("z", "zeta"), ("phi",), ("z", "zeta", "phi", "D")]


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize(
        ("case", "variant"),
        each({str(names): (Case(S=500, documents=3, without=names), Variant()) for names in WITHOUT}),
    )
    @pytest.mark.parametrize("watched", [False, True], ids=["eager", "operators"])
    def test_both_ways_equal_the_scan_without_autograd_bit_for_bit(self, case, variant, watched):
        inputs = make_inputs(case)
        grad_out = make_grad(inputs, 1)
        expected = ours(inputs, grad_out, variant)
        leaves = inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors()))
        with Watching() if watched else nullcontext():
            assert needs_dispatcher((grad_out, *leaves.tensors())) is watched
            result = mamba3_mimo(leaves, CUDA, return_final_state=True)
            grads = torch.autograd.grad(result.out, leaves.tensors(), grad_out)
        results = {"out": result.out, "state": result.final_state.state} | dict(zip(leaves.names, grads, strict=True))
        assert set(results) == set(expected) == {"out", "state", *inputs.names}
        assert all(torch.equal(results[name], expected[name].to(results[name].dtype)) for name in results)

    @scan_of(length=64)
    def test_operators_keep_torchs_rules(self):
        inputs = trained_inputs("cuda", replace(SHAPE, length=64))
        switches = [getattr(CUDA, name) for name in op.SWITCHES]
        arguments = (*(t.detach().requires_grad_() for t in inputs.tensors()), None, None, False, False, *switches)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.ablate.mamba3_scan, arguments, test_utils=tests)

    @scan_of()
    def test_compiled_model_equals_the_eager_one(self):
        inputs = trained_inputs("cuda")
        eager = torch.autograd.grad(small_model(inputs, *inputs.tensors()), inputs.tensors())
        compiled = torch.compile(small_model, fullgraph=True)
        compiled_grads = torch.autograd.grad(compiled(inputs, *inputs.tensors()), inputs.tensors())
        for name, own, other in zip(inputs.names, compiled_grads, eager, strict=True):
            assert global_error(own, other) < 1e-2, name

    @scan_of()
    @pytest.mark.parametrize("compiled", [False, True])
    def test_facts_of_both_passes_are_recorded(self, compiled):
        inputs = trained_inputs("cuda")
        model = torch.compile(small_model, fullgraph=True) if compiled else small_model
        with facts.collect() as seen:
            model(inputs, *inputs.tensors()).backward()
        assert seen["mamba3_mimo.lane"] == "cuda"
        assert seen["mamba3_mimo.tma"] is True
        assert seen["mamba3_mimo.psiv_recomputes"] == 1
        assert {"mamba3_mimo.source_hash.forward", "mamba3_mimo.source_hash.backward"} <= set(seen)

    @scan_of()
    def test_two_runs_give_equal_bits(self):
        inputs = trained_inputs("cuda")
        first, second = run(inputs, CUDA), run(inputs, CUDA)
        assert all(torch.equal(first[name], second[name]) for name in first)

    @scan_of(length=100, batch=1, gradients=False)
    @scan_of(length=90, batch=1, gradients=False)
    def test_decoding_continues_the_sequence(self):
        shape = replace(SHAPE, batch=1, length=100)
        inputs = random_inputs(shape, dtype=torch.bfloat16)
        inputs = inputs.with_tensors(tuple(t.cuda() for t in inputs.tensors()))
        whole = mamba3_mimo(inputs, CUDA).out
        state = mamba3_mimo(piece(inputs, 0, 90), CUDA, return_final_state=True).final_state
        for at in range(90, 100):
            step = piece(inputs, at, at + 1)
            out, state = mamba3_mimo(step, initial_state=state, return_final_state=True)
            assert global_error(out[:, 0], whole[:, at]) < 0.02, at
