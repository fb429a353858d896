"""The CUDA scan for autograd: launched directly in an eager call, otherwise as two torch operators.

The operators (forward and backward) are the form that torch.compile takes without a graph break. Both forms share the
code that launches, saves and returns.

An operator's arguments are the tensors of `ScanInputs`, then the switches, and its schema is made from both. Its fake
kernel is the same host code on tensors without data that launches nothing, so shapes and strides cannot differ from the
real ones. The facts are recorded when the kernels run, under torch.compile, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache, reduce
from operator import or_
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C import DispatchKey as Key
from torch._C import DispatchKeySet as Keys
from torch.autograd.function import once_differentiable

from ablate.kernels import facts
from ablate.kernels.backends import Lane, device_refusal
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo.cuda.host import attest
from ablate.kernels.mamba3_mimo.cuda.host.compiled import Direction, build, kernel
from ablate.kernels.mamba3_mimo.cuda.host.final_state import RowEnd
from ablate.kernels.mamba3_mimo.cuda.host.lengths import choose_walk
from ablate.kernels.mamba3_mimo.cuda.host.scan import TIME_FIRST, TIME_LAST, Scan, laid_out
from ablate.kernels.mamba3_mimo.cuda.host.sizes import ScanPlan, Sizes, choose_heads_in_turn, plan_of
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from ablate.kernels.mamba3_mimo.inputs import DIFFERENTIABLE, OPTIONAL, ScanInputs
from ablate.kernels.scan_switches import ScanFact, ScanSwitches

_PLAIN = (
    *(Key.BackendSelect, Key.ADInplaceOrView),
    *(Key.CPU, Key.AutogradCPU, Key.AutocastCPU),
    *(Key.CUDA, Key.AutogradCUDA, Key.AutocastCUDA),
)
"""Dispatch keys of plain tensors with data on a thread with autograd only."""
_OTHERS = ~reduce(or_, map(Keys, _PLAIN)).raw_repr()

SWITCHES = {field.name: type(field.default).__name__ for field in fields(ScanSwitches) if field.name != "lane"}
"""Switch -> its type in the operators' schema, whose lane is cuda."""
CAPABILITY = (9, 0)
"""Compute capability that the kernels are compiled for."""
PER_PASS = (ScanFact.SOURCE_HASH, ScanFact.BINARY_HASH)
"""Facts that each pass records under its own name, because their values always differ."""

TENSORS = (*DIFFERENTIABLE, "segment_ids")
"""Tensor arguments of both passes, None if absent, before angles_cumulated, return_final_state and the switches."""
_RETURN_FINAL_STATE = 1
"""Index of return_final_state behind the tensors."""

_ARGUMENTS = ", ".join((
    *(f"Tensor{'?' if name in (*OPTIONAL, 'segment_ids') else ''} {name}" for name in TENSORS),
    "bool angles_cumulated",
    "bool return_final_state",
    *(f"{kind} {name}" for name, kind in SWITCHES.items()),
))  # fmt: skip

Tensors: TypeAlias = tuple[Tensor | None, ...]
"""Values of `TENSORS`."""
Options: TypeAlias = tuple[Any, ...]
"""Values of the arguments behind the tensors."""
Ends: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""Inputs of the backward pass: the gradient of o, the final state and its gradient."""


def scan(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Return (o, final state [B,H,N,P] or None); o is bfloat16 [B,S,H,P], or [B,S,R,H,P] without phi.

    q, k, v and z are bfloat16, all other tensors at most float32. The kernels round the biases to bfloat16 before they
    add them. The same kernels run with and without gradients, so a validation pass compiles nothing.

    Raises:
        KernelUnsupported: no kernel supports this combination; the message gives the reason.

    """
    reason = dtype_refusal(inputs)
    if reason is not None:
        raise KernelUnsupported(reason)
    tensors = (*(_prepared(name, getattr(inputs, name)) for name in DIFFERENTIABLE), inputs.segment_ids)
    options = (inputs.angles_cumulated, return_final_state, *(getattr(switches, name) for name in SWITCHES))
    if needs_dispatcher(tensors):
        out, *rest = _forward(*tensors, *options)
    else:
        out, *rest = _with_gradients(_launch_forward, tensors, options)
    return out, rest[0] if return_final_state else None


def needs_dispatcher(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether torch's dispatcher must see the call, because more than autograd observes it.

    Observers are a compiler, a mode, a transform, or a tensor subclass. If autograd itself is excluded, as inside
    another operator, the call must not enable it again.
    """
    if torch.compiler.is_compiling() or torch.overrides.has_torch_function(tensors):
        return True
    keys = torch._C._dispatch_tls_local_include_set().raw_repr()
    for tensor in tensors:
        if tensor is not None:
            keys |= torch._C._dispatch_keys(tensor).raw_repr()
    if keys & _OTHERS:
        return True
    return torch.is_grad_enabled() and torch._C._dispatch_tls_is_dispatch_key_excluded(Key.AutogradFunctionality)


def dtype_refusal(inputs: ScanInputs) -> str | None:
    """Return which tensor has a dtype that the kernels would round, or None."""
    if inputs.v.dtype != torch.bfloat16:
        return f"q, k, v and z have dtype {inputs.v.dtype}; allowed for lane 'cuda': torch.bfloat16"
    for name in inputs.names:
        dtype = getattr(inputs, name).dtype
        if dtype.itemsize > 4 or not dtype.is_floating_point:
            return f"{name} has dtype {dtype}; allowed for lane 'cuda': torch.float32"
    return None


@lru_cache(maxsize=16)
def refusal_on(device: torch.device) -> str | None:
    """Return why the kernels cannot run on `device`, or None if they can."""
    if device.type != "cuda":
        return device_refusal(Lane.CUDA, device.type)
    major, minor = torch.cuda.get_device_capability(device.index)
    if (major, minor) == CAPABILITY:
        return None
    name = torch.cuda.get_device_name(device.index)
    return f"{name} has compute capability {major}.{minor}; allowed for lane 'cuda': 9.0 (H100, H200)"


def _prepared(name: str, tensor: Tensor | None) -> Tensor | None:
    """Return the tensor in the kernels' layout and dtype, so that both passes share one copy.

    The biases stay float32: otherwise their gradients would be rounded to bfloat16.
    """
    dtype = torch.bfloat16 if name in ("q", "k", "v", "z") else torch.float32
    return None if tensor is None else laid_out(tensor, dtype)


def _read(tensors: Tensors, options: Options) -> tuple[ScanInputs, Variant]:
    """Return the inputs and the variant from the arguments of a pass."""
    angles_cumulated, _, *switches = options
    named = dict(zip(TENSORS, tensors, strict=True))
    return ScanInputs.unchecked(**named, angles_cumulated=angles_cumulated), _variant(*switches)


@lru_cache(maxsize=256)
def _variant(*switches: Any) -> Variant:
    return Variant(**dict(zip(SWITCHES, switches, strict=True)))


class _Launched(Scan):
    """A scan that launches its kernels and records their facts."""

    def __init__(self, direction: Direction, tensors: Tensors, options: Options) -> None:
        inputs, variant = _read(tensors, options)
        reason = refusal_on(inputs.v.device)
        if reason is not None:
            raise KernelUnsupported(reason)
        self._direction, self._recording = direction, facts.collecting()
        self._launched: list[str] = []
        self._touched: list[int] = []
        """Addresses of all tensors that kernels received."""
        self._super_chunks: int | None = None
        """Super-chunks of the kernel that passes states on."""
        self._head_sums: int | None = None
        """Sums over heads that `reduce_heads` received."""
        super().__init__(inputs, variant)
        build(direction, self.shape, self.variant)

    def run(self, name: str, *arguments: Tensor | int) -> None:
        """Launch one kernel."""
        self.launches[name](*arguments)
        if not self._recording:
            return
        self._launched.append(name)
        if name in attest.PASSES and isinstance(arguments[0], Tensor):
            self._super_chunks = arguments[0].shape[1]
        if name == "reduce_heads" and isinstance(arguments[0], Tensor):
            self._head_sums = arguments[0].shape[1]
        self._touched += [tensor.data_ptr() for tensor in arguments if isinstance(tensor, Tensor)]

    def record(self, saved: Sequence[Tensor]) -> None:
        """Record facts of the kernels that ran, from their code. `saved` are the tensors between the two passes."""
        if not self._recording:
            return
        names = tuple(dict.fromkeys(self._launched))
        rows, shown = _attested(self.shape, self.variant, names, self._super_chunks)
        self._record_psiv(dict(zip(self.saved, saved, strict=True)).get("psiv"), rows)
        if self._direction == "backward":
            facts.record(ScanFact.REMAT, "outputs" in names and "states" not in self.saved)
        facts.record(ScanFact.HEADS_HALVED, self.halved)
        s, left_open = self.shape, replace(self.variant, schedule="chunk_parallel", superchunk=0)
        of_sizes = choose_walk(left_open, rows=s.B * s.H, tokens=self.tokens, state=s.N * s.P)
        facts.record(ScanFact.SUPERCHUNK_OF_SIZES, of_sizes.superchunk)
        if self._head_sums is not None:
            facts.record(ScanFact.HEADS_IN_TURN, s.H // self._head_sums)
            heads = choose_heads_in_turn(replace(self.variant, heads_in_turn=0), s)
            facts.record(ScanFact.HEADS_IN_TURN_OF_SIZES, heads)
        for row in rows:
            facts.describe(str(row["name"]), row)
        for name, value in shown.items():
            facts.record(f"{name}.{self._direction}" if name in PER_PASS else name, value)

    def _record_psiv(self, psiv: Tensor | None, rows: tuple[attest.Row, ...]) -> None:
        """Record how often PsiV crossed memory, or that a backward walk without it recomputed it."""
        times = 0 if psiv is None else self._touched.count(psiv.data_ptr())
        if psiv is not None and times > 0:
            facts.add(ScanFact.PSIV_SAVED_BYTES, psiv.nbytes if self._direction == "forward" else 0)
            facts.add(ScanFact.PSIV_TRAFFIC_BYTES, psiv.nbytes * times)
        elif any(row["name"] == "gradients" and row.get("psiv_cache") is False for row in rows):
            facts.add(ScanFact.PSIV_RECOMPUTES, 1)


@lru_cache(maxsize=256)
def _attested(
    shape: ScanShape, variant: Variant, names: tuple[str, ...], super_chunks: int | None
) -> tuple[tuple[attest.Row, ...], dict[str, facts.Fact]]:
    """Return the rows and facts of these compiled kernels. Cached, because every layer of every step needs them."""
    rows = attest.table({name: kernel(name, shape, variant) for name in names})
    rows = attest.launched(rows, tokens=shape.S, super_chunks=super_chunks)
    return rows, attest.facts(rows)


class _Shapes(Scan):
    """A scan on tensors without data: allocates like the real scan and launches nothing."""

    def __init__(self, tensors: Tensors, options: Options) -> None:
        super().__init__(*_read(tensors, options))

    def plan_of(self, sizes: Sizes, variant: Variant) -> ScanPlan:
        """Return an uncached plan: sizes that the compiler left open cannot be looked up."""
        return plan_of.__wrapped__(sizes, variant)

    def check(self, variant: Variant) -> None:
        """Refuse nothing. The scan that runs gives the reason, where torch.compile does not wrap it."""

    def aligned(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which has no address."""
        return tensor

    def run(self, name: str, *arguments: Tensor | int) -> None:
        """Launch nothing."""


def _launch_forward(tensors: Tensors, options: Options) -> list[Tensor]:
    # a compiled kernel leaves its own device as the current one
    with torch.cuda.device_of(tensors[0]), torch._C._AutoDispatchBelowAutograd():  # type: ignore[no-untyped-call]
        launched = _Launched("forward", tensors, options)
        results = _flat(launched, options)
    launched.record(results[-len(launched.saved) :])
    return results


def _flat(one: Scan, options: Options) -> list[Tensor]:
    """Return [o, final state if requested, *saved tensors] of a scan."""
    out, final, saved = one.forward(return_final_state=options[_RETURN_FINAL_STATE])
    return [out, *saved] if final is None else [out, final, *saved]


def _launch_backward(ends: Ends, saved: Sequence[Tensor], tensors: Tensors, options: Options) -> list[Tensor]:
    with torch.cuda.device_of(ends[0]), torch._C._AutoDispatchBelowAutograd():  # type: ignore[no-untyped-call]
        launched = _Launched("backward", tensors, options)
        grads = _gradients(launched, ends, saved, tensors)
    launched.record(saved)
    return grads


def _gradients(one: Scan, ends: Ends, saved: Sequence[Tensor], tensors: Tensors) -> list[Tensor]:
    """Return one gradient per present tensor of `DIFFERENTIABLE`, in the kernels' dtypes."""
    grad_out, final, grad_final = ends
    row_end = None if final is None or grad_final is None else RowEnd(final, grad_final)
    grads = one.backward(grad_out, saved, row_end)
    return [grads[name] for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False) if tensor is not None]


Forward: TypeAlias = Callable[[Tensors, Options], list[Tensor]]


class _Pass(torch.autograd.Function):
    """The forward pass in one of its two forms, with the backward pass as its gradient."""

    @staticmethod
    def forward(ctx: Any, run: Forward, options: Options, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Run the forward pass and save its tensors and results, except o. An operator also returns saved tensors."""
        tensors = tuple(map(_rounded, TENSORS, tensors))
        output = tuple(run(tensors, options))
        ctx.options, ctx.num_results = options, 1 + options[_RETURN_FINAL_STATE]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        if run is _launch_forward:
            return output[: ctx.num_results]
        ctx.mark_non_differentiable(*output[ctx.num_results :])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return one gradient per argument of `forward`, None for an argument without gradient."""
        grad_out, grad_final = (*grads[: ctx.num_results], None)[:2]
        if grad_out is None and grad_final is None:
            return (None,) * (2 + len(TENSORS))
        kept = ctx.saved_tensors
        tensors, saved, final = kept[: len(TENSORS)], list(kept[len(TENSORS) :]), None
        if ctx.num_results > 1:
            final = saved.pop(0)
        ends = _zeros_of_output(tensors) if grad_out is None else grad_out, final, grad_final
        run = _backward_of_operator if needs_dispatcher(ends) else _launch_backward
        results = iter(run(ends, saved, tensors, ctx.options))
        present = [tensor is not None for tensor in tensors[: len(DIFFERENTIABLE)]]
        return None, None, *(next(results) if is_present else None for is_present in present), None


def _rounded(name: str, tensor: Tensor | None) -> Tensor | None:
    """Return the tensor as both passes read it. A bias is rounded here, below autograd, so its gradient is not."""
    return tensor.to(torch.bfloat16) if tensor is not None and name in ("q_bias", "k_bias") else tensor


def _zeros_of_output(tensors: Tensors) -> Tensor:
    """Return a zero gradient of o, for a loss that uses only the final state."""
    named: Any = dict(zip(TENSORS, tensors, strict=True))
    v, ranks = named["v"], named["psi"].shape[1:2] if named["phi"] is None else ()
    zeros: Tensor = v.new_zeros(*v.shape[:2], *ranks, *v.shape[2:])
    return zeros


def _with_gradients(run: Forward, tensors: Tensors, options: Options) -> Sequence[Tensor]:
    """Run the forward pass so that autograd can run its backward pass."""
    if not torch.is_grad_enabled():
        return run(tensors, options)
    results: tuple[Tensor, ...] = _Pass.apply(run, options, *tensors)  # type: ignore[no-untyped-call]
    return results


def _parted(arguments: tuple[Any, ...]) -> tuple[Tensors, Options]:
    return arguments[: len(TENSORS)], arguments[len(TENSORS) :]


def _forward_of_operator(tensors: Tensors, options: Options) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        results: list[Tensor] = _forward(*tensors, *options)
    return results


def _backward_of_operator(ends: Ends, saved: Sequence[Tensor], tensors: Tensors, options: Options) -> list[Tensor]:
    results: list[Tensor] = _backward(*ends, saved, *tensors, *options)
    return results


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    tensors, options = _parted(arguments)
    return _flat(_Shapes(tensors, options), options)


def _backward_shapes(
    grad_out: Tensor, final: Tensor | None, grad_final: Tensor | None, saved: list[Tensor], *rest: Any
) -> list[Tensor]:
    tensors, options = _parted(rest)
    return _apart(_gradients(_Shapes(tensors, options), (grad_out, final, grad_final), saved, tensors), tensors)


def _launch_backward_apart(
    grad_out: Tensor, final: Tensor | None, grad_final: Tensor | None, saved: list[Tensor], *rest: Any
) -> list[Tensor]:
    tensors, options = _parted(rest)
    return _apart(_launch_backward((grad_out, final, grad_final), saved, tensors, options), tensors)


def _apart(grads: list[Tensor], tensors: Tensors) -> list[Tensor]:
    """Return the gradients without shared memory, as an operator must. Those of the weights are views of sums."""
    names = (name for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False) if tensor is not None)
    unshared = (*TIME_FIRST, *TIME_LAST)
    return [grad if name in unshared else grad.clone() for name, grad in zip(names, grads, strict=True)]


def _operator(name: str, arguments: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Define and return an operator that returns tensors.

    Not with torch.library.custom_op: on the machine of the receipts its wrappers took 2.0 of the 3.1 ms of host time of
    a forward and backward pass.
    """
    _LIBRARY.define(f"{name}({arguments}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", shapes, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _LIBRARY.ns), name).default


_LIBRARY: Any = torch.library.Library("ablate", "DEF")  # type: ignore[no-untyped-call]
_forward = _operator("mamba3_scan", _ARGUMENTS, lambda *args: _launch_forward(*_parted(args)), _forward_shapes)
_backward = _operator(
    "mamba3_scan_backward",
    f"Tensor grad_out, Tensor? final, Tensor? grad_final, Tensor[] saved, {_ARGUMENTS}",
    _launch_backward_apart,
    _backward_shapes,
)
_LIBRARY.impl("mamba3_scan", lambda *args: list(_with_gradients(_forward_of_operator, *_parted(args))), "Autograd")
