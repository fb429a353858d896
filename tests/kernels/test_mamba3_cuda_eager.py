"""The two ways of the CUDA lane: an eager call launches at once, where more than autograd looks on it is two operators.

On a CPU, with interpreted kernels that round as on a GPU.
"""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("tilelang")

from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import ScanInputs, mamba3_mimo
from ablate.kernels.mamba3_mimo.cuda.host import op
from ablate.kernels.mamba3_mimo.cuda.host.op import needs_dispatcher
from ablate.kernels.mamba3_mimo.cuda.shape import Variant
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.checked import ours
from tests.kernels.host_time import Watching, unlaunched
from tests.kernels.interpreted_lane import interpreted_lane
from tests.kernels.problem import Case, make_grad, make_inputs

CUDA = ScanSwitches(lane=Lane.CUDA)
CASE = Case(B=1, S=20, H=1, G=1, N=16, P=32, R=2)
STATE = torch.linspace(-1, 1, 16 * 32).view(1, 1, 16, 32)
STATE_GRAD = STATE.flip(2)
BOTH = ["ablate.mamba3_scan.default", "ablate.mamba3_scan_backward.default"]


def leaves_of(case: Case = CASE, **changes) -> ScanInputs:
    inputs = replace(make_inputs(case, "cpu"), **changes)
    return inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors()))


def both_passes(inputs, *, of_state=True, of_out=True):
    """Return all results of a scan: output, final state, gradients."""
    result = mamba3_mimo(inputs, CUDA, return_final_state=True)
    ends = {result.out: make_grad(inputs, 1)} if of_out else {}
    ends |= {result.final_state.state: STATE_GRAD} if of_state else {}
    grads = torch.autograd.grad([*ends], inputs.tensors(), [*ends.values()])
    return {"out": result.out, "state": result.final_state.state} | dict(zip(inputs.names, grads, strict=True))


def assert_equal(actual, expected):
    assert {name: (t.shape, t.dtype) for name, t in actual.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    assert all(t.isfinite().all() for t in expected.values())


@contextmanager
def without_operators(monkeypatch):
    with monkeypatch.context() as patched:
        for name in ("_forward", "_backward"):
            patched.setattr(op, name, lambda *_: pytest.fail("an operator was called"))
        yield


CHANGES = {
    "default": {},
    "documents": {"segment_ids": (torch.arange(20) // 7).view(1, 20)},
    "per_rank_without_gate_and_skip": {"phi": None, "z": None, "zeta": None, "D": None},
    "started": {"entering": STATE},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_both_ways_give_equal_bits(changes, monkeypatch):
    with interpreted_lane():
        with without_operators(monkeypatch):
            eager = both_passes(leaves_of(**changes))
        with Watching() as mode:
            watched = both_passes(leaves_of(**changes))
    assert mode.seen == BOTH
    assert set(eager) == {"out", "state", *leaves_of(**changes).names}
    assert_equal(eager, watched)


@pytest.mark.parametrize("ends", [{"of_state": False}, {"of_out": False}])
def test_both_ways_take_the_gradient_of_one_result_alone(ends, monkeypatch):
    with interpreted_lane():
        with without_operators(monkeypatch):
            eager = both_passes(leaves_of(), **ends)
        with Watching() as mode:
            watched = both_passes(leaves_of(), **ends)
    assert mode.seen == BOTH
    assert_equal(eager, watched)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about its own parts
def test_a_compiled_call_takes_the_operators_and_gives_equal_bits():
    seen = []

    def keep(graph, _examples):
        seen.extend(str(node.target) for node in graph.graph.nodes if "mamba3_scan" in str(node.target))
        return graph.forward

    def model(*tensors):
        return mamba3_mimo(inputs.with_tensors(tensors), CUDA).out

    inputs = leaves_of()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    with interpreted_lane():
        out = compiled(*inputs.tensors())
        grads = torch.autograd.grad(out, inputs.tensors(), make_grad(inputs, 1))
    assert seen == BOTH
    assert torch.equal(out, expected()["out"])
    assert [n for n, g in zip(inputs.names, grads, strict=True) if not torch.equal(g, expected()[n])] == []


def test_a_pass_may_be_watched_that_goes_back_through_one_that_was_not(monkeypatch):
    with unlaunched():
        inputs = leaves_of()
        with Watching() as mode:
            out = mamba3_mimo(inputs, CUDA).out
        with without_operators(monkeypatch):
            out.float().sum().backward()
            out = mamba3_mimo(inputs, CUDA).out
        with mode:
            out.float().sum().backward()
    assert mode.seen == BOTH


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_calls_no_operator(without, monkeypatch):
    with interpreted_lane(), without_operators(monkeypatch), without():
        result = mamba3_mimo(leaves_of(), CUDA, return_final_state=True)
    assert torch.equal(result.out, expected()["out"])
    assert torch.equal(result.final_state.state, expected()["state"])
    assert not result.out.requires_grad
    assert not result.final_state.state.requires_grad


def test_both_ways_record_equal_facts(monkeypatch):
    monkeypatch.setattr(
        op, "_attested", lambda _shape, _variant, names, handed: ((), {"names": str(names), "handed": handed})
    )
    results = []
    for watching in (nullcontext(), Watching()):
        with unlaunched(), facts.collect() as seen, watching:
            both_passes(leaves_of())
        results.append(seen)
    assert results[0] == results[1]
    assert {"handed", "mamba3_mimo.remat"} <= set(results[0])
    assert results[0]["names"] == "mixed"  # recorded by both passes


@cache
def expected() -> dict[str, torch.Tensor]:
    """Return all results, with the gradients from the output alone."""
    with interpreted_lane():
        return both_passes(leaves_of(), of_state=False)


def test_an_eager_call_equals_the_scan_without_autograd():
    """Also in its dtypes: the biases are rounded for the kernels, their gradients are not."""
    inputs = make_inputs(CASE, "cpu")
    with interpreted_lane():
        results = ours(inputs, make_grad(inputs, 1), Variant())
    assert {results[name].dtype for name in ("q_bias", "k_bias", "psi")} == {torch.float32}
    assert not torch.equal(results["q_bias"], results["q_bias"].bfloat16().float())
    assert_equal(results, expected())


def test_only_the_gradients_that_are_asked_for_come_back():
    inputs = make_inputs(CASE, "cpu")
    asked = replace(inputs, k=inputs.k.requires_grad_(), psi=inputs.psi.requires_grad_())
    with interpreted_lane():
        mamba3_mimo(asked, CUDA).out.backward(make_grad(inputs, 1))
    assert torch.equal(asked.k.grad, expected()["k"])
    assert torch.equal(asked.psi.grad, expected()["psi"])
    assert all(tensor.grad is None for tensor in asked.tensors() if not tensor.requires_grad)


def test_gradients_add_up_each_in_memory_of_its_own():
    """Those of weights are parts of one sum: what is done to one of them must not reach its neighbour."""
    inputs = leaves_of()
    with interpreted_lane():
        out, grad = mamba3_mimo(inputs, CUDA).out, make_grad(inputs, 1)
        out.backward(grad, retain_graph=True)
        out.backward(grad)
        with pytest.raises(RuntimeError, match="second time"):
            out.backward(grad)
    for name, tensor in zip(inputs.names, inputs.tensors(), strict=True):
        assert torch.equal(tensor.grad, 2 * expected()[name]), name
        tensor.grad.zero_()


def test_gradients_have_no_gradients():
    with unlaunched():
        inputs = leaves_of()
        out = mamba3_mimo(inputs, CUDA).out
        (grad,) = torch.autograd.grad(out, (inputs.adt,), torch.ones_like(out).requires_grad_(), create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_an_input_that_was_written_to_between_the_passes_is_found():
    with unlaunched():
        inputs = leaves_of()
        out = mamba3_mimo(inputs, CUDA).out
        with torch.no_grad():
            inputs.dt.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.float().sum().backward()


def test_all_that_is_kept_goes_through_the_hooks_of_saved_tensors():
    """As those that bring it to the host's memory: nothing else holds a tensor between the passes."""
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor.clone())
        return len(packed) - 1

    def unpack(place):
        unpacked.append(place)
        return packed[place]

    inputs = leaves_of()
    with interpreted_lane():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = mamba3_mimo(inputs, CUDA).out
        grads = torch.autograd.grad(out, inputs.tensors(), make_grad(inputs, 1))
    assert [n for n, g in zip(inputs.names, grads, strict=True) if not torch.equal(g, expected()[n])] == []
    assert unpacked == list(range(len(packed)))
    assert len(packed) > len(inputs.names) + 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_scan_is_made_again_by_activation_checkpointing(reentrant, monkeypatch):
    def block(q, *rest):
        return mamba3_mimo(inputs.with_tensors((q * 1, *rest)), CUDA).out

    with interpreted_lane(), without_operators(monkeypatch):
        inputs = leaves_of()
        checkpoint(block, *inputs.tensors(), use_reentrant=reentrant).backward(make_grad(inputs, 1))
    grads = {name: getattr(inputs, name).grad for name in inputs.names}
    assert [name for name, grad in grads.items() if not torch.equal(grad, expected()[name])] == []


def test_what_is_kept_lives_as_long_as_the_graph_and_no_longer():
    alive = []

    def keep(tensor):
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor.detach()  # a result that is kept itself would hold the graph that holds it

    with unlaunched():
        inputs = leaves_of()
        gc.collect()
        gc.disable()
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = mamba3_mimo(inputs, CUDA, return_final_state=True)
            held = [ref() is not None for ref in alive]
            del result
            left = [ref() for ref in alive]
        finally:
            gc.enable()
    assert all(held)
    storages = {tensor.untyped_storage()._cdata for tensor in inputs.tensors()}
    assert [one for one in left if one is not None and one._cdata not in storages] == []


class Named(torch.Tensor):
    """A tensor of a kind of its own."""


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


PLAIN = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "saved_tensors_hooks": lambda: torch.autograd.graph.save_on_cpu(),
}
WATCHED = {
    "dispatch_mode": Watching,
    "fake_tensors": FakeTensorMode,
    "function_mode": Passing,
    "inside_an_operator": torch._C._AutoDispatchBelowAutograd,
}


@pytest.mark.parametrize("mode", PLAIN.values(), ids=PLAIN)
def test_plain_tensors_are_not_watched(mode):
    with mode():
        assert not needs_dispatcher((torch.ones(2), None, torch.nn.Parameter(torch.ones(2)), torch.arange(2)))


@pytest.mark.parametrize("mode", WATCHED.values(), ids=WATCHED)
def test_modes_are_seen(mode):
    tensors = (None, torch.ones(2))
    with mode():
        assert needs_dispatcher(tensors)
    assert not needs_dispatcher(tensors)


def test_tensors_that_stand_for_others_are_seen():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    negative = torch.ones(1, dtype=torch.complex64).conj().imag
    for tensor in (fake, torch.ones(2).as_subclass(Named), torch.ones(2, device="meta"), negative):
        assert needs_dispatcher((torch.ones(2), tensor)), type(tensor)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_transforms_and_traces_are_seen():
    seen = []

    def function(tensor):
        seen.append(needs_dispatcher((torch.ones(2),)))
        return tensor.sum()

    torch.func.grad(function)(torch.ones(2))
    torch.vmap(function)(torch.ones(2, 2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    torch.fx.experimental.proxy_tensor.make_fx(function, pre_dispatch=True)(torch.ones(2))
    torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    assert seen == [True] * 5
