"""Run one problem (on a GPU twice) and return its outcome.

Buffers that the lane creates with torch.empty hold NaN, and so do the gaps between the numbers of its inputs. A refusal
counts only if no kernel was compiled before.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from ablate.kernels import facts
from ablate.kernels.errors import KernelError
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from tests.kernels import criterion
from tests.kernels.accuracy import poisoned_buffers
from tests.kernels.criterion import Results
from tests.kernels.fuzz import planning, tensors
from tests.kernels.fuzz.outcomes import Ending, FuzzOutcome, failed
from tests.kernels.fuzz.problems import ScanProblem, must_be_refused
from tests.kernels.problem import scanned

Scan: TypeAlias = Callable[[ScanInputs, ScanSwitches], tuple[Tensor, Tensor]]
"""(inputs, switches) -> (o, final state), differentiable."""
TRIES_FOR_MEMORY, WAIT_FOR_MEMORY_S = 8, 5.0


def scan_of(inputs: ScanInputs, switches: ScanSwitches) -> tuple[Tensor, Tensor]:
    """Run the scan as its users do."""
    return scanned(switches)(inputs)


def run(problem: ScanProblem, *, scan: Scan = scan_of, device: str = "cuda") -> FuzzOutcome:
    """Run the problem on `device` and return its outcome. Exceptions become outcomes.

    Several processes share the memory of a GPU, which one problem in float64 may nearly fill. A process without memory
    waits for the others and tries again.
    """
    outcome = _tried(problem, scan, device)
    for _ in range(TRIES_FOR_MEMORY - 1):
        if not outcome.why.startswith(torch.OutOfMemoryError.__name__):
            break
        torch.cuda.empty_cache()
        time.sleep(WAIT_FOR_MEMORY_S)
        outcome = _tried(problem, scan, device)
    if device != "cpu":
        torch.cuda.empty_cache()  # frees cached memory for the other processes
    return outcome


def _tried(problem: ScanProblem, scan: Scan, device: str) -> FuzzOutcome:
    try:
        reason = planning.refusal(problem)
        if reason is not None:
            return _refused(problem, scan, device)
        promise = must_be_refused(problem)
        if promise is not None:
            return FuzzOutcome(problem=problem, ending="failed", why=f"not refused although {promise}")
        return _ran(problem, scan, device).model_copy(update={"walk": planning.walk(problem)})
    except Exception as error:  # boundary of the fuzz: every error is a result
        return failed(problem, error)


def _refused(problem: ScanProblem, scan: Scan, device: str) -> FuzzOutcome:
    """Run a problem that must be refused before any compilation."""
    with facts.collect() as recorded:
        try:
            inputs, grad_out = tensors.made(problem, device)
            _results(problem, scan, inputs, grad_out)
        except KernelError as error:
            if not any(recorded.get(name) for name in (ScanFact.KERNELS_COMPILED, ScanFact.KERNELS_LOADED)):
                return FuzzOutcome(problem=problem, ending="refused", why=str(error))
            return FuzzOutcome(problem=problem, ending="failed", why=f"refused after compiling: {error}")
    return FuzzOutcome(problem=problem, ending="failed", why="refused for tensors without data, but runs")


def _ran(problem: ScanProblem, scan: Scan, device: str) -> FuzzOutcome:
    with _surroundings(problem, device) as place:
        inputs, grad_out = tensors.made(problem, place)
        before = {name: tensor.clone() for name, tensor in _tensors(inputs, grad_out).items()}
        got = _results(problem, scan, inputs, grad_out)
        again = got if device == "cpu" else _results(problem, scan, inputs, grad_out)
        broken = _broken_promises(inputs, got)
        broken += [
            f"{name} was changed" for name, t in _tensors(inputs, grad_out).items() if not torch.equal(t, before[name])
        ]
        if broken:
            return FuzzOutcome(problem=problem, ending="failed", why="; ".join(broken))
        shares = criterion.shares(got, inputs, grad_out, tensors.final_gradient(problem, place))
        errors = {name: (share.whole, share.row) for name, share in shares.items()}
        wrong = [name for name, share in shares.items() if not share.right]
        other = [name for name, tensor in got.items() if not _same_bits(tensor, again[name])]
        why = _described(wrong, got, errors) if wrong else ""
        why += f"{'; ' * bool(wrong)}other bits in a second run: {', '.join(other)}" if other else ""
        ending: Ending = "wrong" if wrong else "unrepeatable" if other else "right"
        return FuzzOutcome(problem=problem, ending=ending, why=why, errors=errors)


def _tensors(inputs: ScanInputs, grad_out: Tensor) -> dict[str, Tensor]:
    ids = {} if inputs.segment_ids is None else {"segment_ids": inputs.segment_ids}
    return dict(zip(inputs.names, inputs.tensors(), strict=True)) | ids | {"grad_out": grad_out}


@contextmanager
def _surroundings(problem: ScanProblem, device: str) -> Iterator[torch.device]:
    """Yield the tensors' device, with the stream and the current device of the problem."""
    if device == "cpu":
        yield torch.device("cpu")
        return
    last = torch.cuda.device_count() - 1
    place = torch.device("cuda", last if problem.other_device else 0)
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.device(0))
        if problem.other_stream:
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(place)))  # type: ignore[no-untyped-call]
            stack.enter_context(torch.cuda.device(0))
        current = torch.cuda.current_device(), torch.cuda.current_stream(place)
        yield place
        if current != (torch.cuda.current_device(), torch.cuda.current_stream(place)):
            raise KernelError("the current device or stream is another one after the scan")


def _results(problem: ScanProblem, scan: Scan, inputs: ScanInputs, grad_out: Tensor) -> Results:
    """Return o, the final state and the requested gradients by name."""
    names = inputs.names if problem.wanted is None else problem.wanted
    leaves = {name: getattr(inputs, name).detach().requires_grad_(name in names) for name in inputs.names}
    with poisoned_buffers(), torch.set_grad_enabled(bool(names)):
        outputs = scan(inputs.with_tensors(tuple(leaves.values())), planning.switches(problem))
        weights = [grad for grad in (grad_out, tensors.final_gradient(problem, grad_out.device)) if grad is not None]
        by = [leaves[name] for name in names]
        grads = torch.autograd.grad(outputs[: len(weights)], by, weights) if names else ()
    out, state = outputs
    if out.is_cuda:
        torch.cuda.synchronize(out.device)
    return {"out": out.detach(), "state": state.detach(), **dict(zip(names, grads, strict=True))}


def _broken_promises(inputs: ScanInputs, got: Results) -> list[str]:
    """Return the faults in the results' shapes and dtypes."""
    heads, width = inputs.v.shape[2:]
    ranks = inputs.psi.shape[1:2] if inputs.phi is None else ()
    sizes = {"out": (*inputs.v.shape[:2], *ranks, heads, width)}
    sizes["state"] = (inputs.v.shape[0], heads, inputs.state_size, width)
    dtypes = {"out": inputs.v.dtype, "state": torch.float32}
    for name, tensor in zip(inputs.names, inputs.tensors(), strict=True):
        sizes[name], dtypes[name] = tuple(tensor.shape), tensor.dtype
    return [
        f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtypes[name]} {list(sizes[name])}"
        for name, tensor in got.items()
        if (tuple(tensor.shape), tensor.dtype) != (sizes[name], dtypes[name])
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _described(wrong: list[str], got: Results, errors: dict[str, tuple[float, float]]) -> str:
    """Return the wrong results with their errors, NaN and infinity first."""
    lost = {name: int((~got[name].isfinite()).sum()) for name in wrong}
    texts = [f"{name}: {count} of {got[name].numel()} not finite" for name, count in lost.items() if count]
    texts += [f"{name}: {errors[name][0]:.3g} / {errors[name][1]:.3g}" for name in wrong if not lost[name]]
    return f"{'; '.join(texts)} (limits {criterion.LIMITS})"
