"""The CUDA scan for autograd: launched from here in an eager call, as two torch operators where more looks on.

The operators, forward and backward, are what torch.compile takes without a graph break. What is launched, saved and
handed back is stated once for both ways.

An operator's arguments are the tensors of `ScanInputs`, then the switches: the schema is made from both.
Its fake kernel is the same host code on tensors without data, with nothing launched, so shapes and strides cannot
drift from those of the real one. The facts are recorded here, when the kernels run: under torch.compile too.
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

from kernels import facts
from kernels.backends import Lane, device_refusal
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo.cuda.host import attest
from kernels.mamba3_mimo.cuda.host.compiled import Direction, build, kernel
from kernels.mamba3_mimo.cuda.host.final_state import beyond_of
from kernels.mamba3_mimo.cuda.host.lengths import chosen
from kernels.mamba3_mimo.cuda.host.scan import TIME_FIRST, TIME_LAST, Scan, laid_out
from kernels.mamba3_mimo.cuda.host.sizes import Settled, Sizes, in_turn, settled
from kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, OPTIONAL, ScanInputs
from kernels.scan_switches import ScanFact, ScanSwitches

_ALONE = (
    *(Key.BackendSelect, Key.ADInplaceOrView),
    *(Key.CPU, Key.AutogradCPU, Key.AutocastCPU),
    *(Key.CUDA, Key.AutogradCUDA, Key.AutocastCUDA),
)
"""Keys of the dispatcher that plain tensors with data have, and a thread on which nothing but autograd is on."""
_OTHERS = ~reduce(or_, map(Keys, _ALONE)).raw_repr()


def is_watched(tensors: Sequence[Tensor | None]) -> bool:
    """Tell whether more than autograd looks on: a compiler, a mode, a transform, a tensor that stands for another.

    Where autograd itself is shut out, as inside another operator, it must not be let in again.
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


SWITCHES = {field.name: type(field.default).__name__ for field in fields(ScanSwitches) if field.name != "lane"}
"""Switch -> its type in the operators' schema; their lane is cuda."""
CAPABILITY = (9, 0)
"""Compute capability that the kernels are compiled for."""
PER_PASS = (ScanFact.SOURCE_HASH, ScanFact.BINARY_HASH)
"""Facts that the two passes record apart: their values always differ."""

TENSORS = (*DIFFERENTIABLE, "segment_ids")
"""What both passes take, None for what is not given; then whether the angles are cumulated, whether the final state is
asked for, and the switches."""
_RETURN_FINAL_STATE = 1
"""Its place behind the tensors."""

_ARGUMENTS = ", ".join((
    *(f"Tensor{'?' if name in (*OPTIONAL, 'segment_ids') else ''} {name}" for name in TENSORS),
    "bool angles_cumulated",
    "bool return_final_state",
    *(f"{kind} {name}" for name, kind in SWITCHES.items()),
))  # fmt: skip

Tensors: TypeAlias = tuple[Tensor | None, ...]
"""Those of `TENSORS`."""
Asked: TypeAlias = tuple[Any, ...]
"""What comes behind them."""
Ends: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""What the backward pass begins with: the gradient of o, the final state and its gradient."""


def scan(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Return (o, final state [B,H,N,P] if asked for); o is bfloat16 [B,S,H,P], or [B,S,R,H,P] without phi.

    q, k, v and z are bfloat16, all else at most float32; the kernels round the biases to bfloat16 before they add them.
    The same kernels run with and without gradients: a validation pass compiles nothing. Raises KernelUnsupported with
    the reason when no kernel does this combination.
    """
    reason = dtype_refusal(inputs)
    if reason is not None:
        raise KernelUnsupported(reason)
    tensors = (*(_prepared(name, getattr(inputs, name)) for name in DIFFERENTIABLE), inputs.segment_ids)
    asked = (inputs.angles_cumulated, return_final_state, *(getattr(switches, name) for name in SWITCHES))
    if is_watched(tensors):
        out, *rest = _forward(*tensors, *asked)
    else:
        out, *rest = _with_gradients(_launch_forward, tensors, asked)
    return out, rest[0] if return_final_state else None


def dtype_refusal(inputs: ScanInputs) -> str | None:
    """Return which tensor the kernels would round, or None when they take all as they are."""
    if inputs.v.dtype != torch.bfloat16:
        return f"q, k, v and z have dtype {inputs.v.dtype}; allowed for lane 'cuda': torch.bfloat16"
    for name in inputs.names:
        dtype = getattr(inputs, name).dtype
        if dtype.itemsize > 4 or not dtype.is_floating_point:
            return f"{name} has dtype {dtype}; allowed for lane 'cuda': torch.float32"
    return None


@lru_cache(maxsize=16)
def refusal_on(device: torch.device) -> str | None:
    """Return why the kernels cannot run on `device`, or None when they can."""
    if device.type != "cuda":
        return device_refusal(Lane.CUDA, device.type)
    major, minor = torch.cuda.get_device_capability(device.index)
    if (major, minor) == CAPABILITY:
        return None
    name = torch.cuda.get_device_name(device.index)
    return f"{name} has compute capability {major}.{minor}; allowed for lane 'cuda': 9.0 (H100, H200)"


def _prepared(name: str, tensor: Tensor | None) -> Tensor | None:
    """Return the tensor in the layout that the kernels read, so that both passes share one copy.

    Also in their dtype, but for the biases, whose gradients would be rounded to it.
    """
    dtype = torch.bfloat16 if name in ("q", "k", "v", "z") else torch.float32
    return None if tensor is None else laid_out(tensor, dtype)


def _read(tensors: Tensors, asked: Asked) -> tuple[ScanInputs, Variant]:
    """Return what the arguments of a pass were made from."""
    angles_cumulated, _, *switches = asked
    given = dict(zip(TENSORS, tensors, strict=True))
    return ScanInputs.unchecked(**given, angles_cumulated=angles_cumulated), _variant(*switches)


@lru_cache(maxsize=256)
def _variant(*switches: Any) -> Variant:
    return Variant(**dict(zip(SWITCHES, switches, strict=True)))


class _Launched(Scan):
    """A scan whose kernels run, and say afterwards what they are."""

    def __init__(self, direction: Direction, tensors: Tensors, asked: Asked) -> None:
        inputs, variant = _read(tensors, asked)
        reason = refusal_on(inputs.v.device)
        if reason is not None:
            raise KernelUnsupported(reason)
        self._direction, self._told = direction, facts.collecting()
        self._launched: list[str] = []
        self._touched: list[int] = []
        self._handed: int | None = None
        self._sums: int | None = None
        super().__init__(inputs, variant)
        build(direction, self.shape, self.variant)

    def run(self, name: str, *arguments: Tensor | int) -> None:
        """Launch one kernel."""
        self.launches[name](*arguments)
        if not self._told:
            return
        self._launched.append(name)
        if name in attest.PASSES and isinstance(arguments[0], Tensor):
            self._handed = arguments[0].shape[1]
        if name == "reduce_heads" and isinstance(arguments[0], Tensor):
            self._sums = arguments[0].shape[1]
        self._touched += [tensor.data_ptr() for tensor in arguments if isinstance(tensor, Tensor)]

    def record(self, saved: Sequence[Tensor]) -> None:
        """Record what ran, as its code shows it; `saved` are the tensors kept between the two passes."""
        if not self._told:
            return
        names = tuple(dict.fromkeys(self._launched))
        rows, found = _attested(self.shape, self.variant, names, self._handed)
        self._record_psiv(dict(zip(self.saved, saved, strict=True)).get("psiv"), rows)
        if self._direction == "backward":
            facts.record(ScanFact.REMAT, "outputs" in names and "states" not in self.saved)
        facts.record(ScanFact.HEADS_HALVED, self.halved)
        s, left_open = self.shape, replace(self.variant, schedule="chunk_parallel", superchunk=0)
        suited = chosen(left_open, rows=s.B * s.H, tokens=self.tokens, state=s.N * s.P)
        facts.record(ScanFact.SUPERCHUNK_OF_SIZES, suited.superchunk)
        if self._sums is not None:
            facts.record(ScanFact.HEADS_IN_TURN, s.H // self._sums)
            facts.record(ScanFact.HEADS_IN_TURN_OF_SIZES, in_turn(replace(self.variant, heads_in_turn=0), s))
        for row in rows:
            facts.describe(str(row["name"]), row)
        for name, value in found.items():
            facts.record(f"{name}.{self._direction}" if name in PER_PASS else name, value)

    def _record_psiv(self, psiv: Tensor | None, rows: tuple[attest.Row, ...]) -> None:
        """Record how often PsiV crossed memory, and that it was made again in a backward walk that takes none."""
        times = 0 if psiv is None else self._touched.count(psiv.data_ptr())
        if psiv is not None and times > 0:
            facts.add(ScanFact.PSIV_SAVED_BYTES, psiv.nbytes if self._direction == "forward" else 0)
            facts.add(ScanFact.PSIV_TRAFFIC_BYTES, psiv.nbytes * times)
        elif any(row["name"] == "gradients" and row.get("psiv_cache") is False for row in rows):
            facts.add(ScanFact.PSIV_RECOMPUTES, 1)


@lru_cache(maxsize=256)
def _attested(
    shape: ScanShape, variant: Variant, names: tuple[str, ...], handed: int | None
) -> tuple[tuple[attest.Row, ...], dict[str, facts.Fact]]:
    """Return the rows and facts of these compiled kernels, read from disk once: every layer of every step asks."""
    rows = attest.table({name: kernel(name, shape, variant) for name in names})
    rows = attest.launched(rows, tokens=shape.S, handed=handed)
    return rows, attest.facts(rows)


class _Shapes(Scan):
    """A scan on tensors without data: allocates what the real one does and launches nothing."""

    def __init__(self, tensors: Tensors, asked: Asked) -> None:
        super().__init__(*_read(tensors, asked))

    def settled(self, sizes: Sizes, variant: Variant) -> Settled:
        """Return what sizes and switches decide, made anew: sizes that the compiler left open cannot be looked up."""
        return settled.__wrapped__(sizes, variant)

    def check(self, variant: Variant) -> None:
        """Refuse nothing: the scan that runs says why, where torch.compile does not wrap the reason."""

    def aligned(self, tensor: Tensor) -> Tensor:
        """Return the tensor: it has no address."""
        return tensor

    def run(self, name: str, *arguments: Tensor | int) -> None:
        """Launch nothing."""


def _launch_forward(tensors: Tensors, asked: Asked) -> list[Tensor]:
    # a compiled kernel leaves its own device as the current one
    with torch.cuda.device_of(tensors[0]), torch._C._AutoDispatchBelowAutograd():  # type: ignore[no-untyped-call]
        launched = _Launched("forward", tensors, asked)
        results = _flat(launched, asked)
    launched.record(results[-len(launched.saved) :])
    return results


def _flat(made: Scan, asked: Asked) -> list[Tensor]:
    """Return [o, the final state if it is asked for, *what the backward pass needs]."""
    out, final, saved = made.forward(return_final_state=asked[_RETURN_FINAL_STATE])
    return [out, *saved] if final is None else [out, final, *saved]


def _launch_backward(ends: Ends, saved: Sequence[Tensor], tensors: Tensors, asked: Asked) -> list[Tensor]:
    with torch.cuda.device_of(ends[0]), torch._C._AutoDispatchBelowAutograd():  # type: ignore[no-untyped-call]
        launched = _Launched("backward", tensors, asked)
        grads = _gradients(launched, ends, saved, tensors)
    launched.record(saved)
    return grads


def _gradients(made: Scan, ends: Ends, saved: Sequence[Tensor], tensors: Tensors) -> list[Tensor]:
    """Return one gradient for every tensor of `DIFFERENTIABLE` that is given, in the kernels' dtype."""
    grad_out, final, grad_final = ends
    grads = made.backward(grad_out, saved, beyond_of(final, grad_final))
    return [grads[name] for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False) if tensor is not None]


Forward: TypeAlias = Callable[[Tensors, Asked], list[Tensor]]


class _Pass(torch.autograd.Function):
    """The forward pass, run in one of the two ways, with the backward pass as its gradient."""

    @staticmethod
    def forward(ctx: Any, run: Forward, asked: Asked, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Run the forward pass; keep its tensors and all results but o. An operator returns what is kept, too."""
        tensors = tuple(map(_rounded, TENSORS, tensors))
        output = tuple(run(tensors, asked))
        ctx.asked, ctx.told = asked, 1 + asked[_RETURN_FINAL_STATE]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        if run is _launch_forward:
            return output[: ctx.told]
        ctx.mark_non_differentiable(*output[ctx.told :])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return one gradient per argument of `forward`, None for what is not differentiable."""
        grad_out, grad_final = (*grads[: ctx.told], None)[:2]
        if grad_out is None and grad_final is None:
            return (None,) * (2 + len(TENSORS))
        kept = ctx.saved_tensors
        tensors, saved, final = kept[: len(TENSORS)], list(kept[len(TENSORS) :]), None
        if ctx.told > 1:
            final = saved.pop(0)
        ends = _zeros_of_output(tensors) if grad_out is None else grad_out, final, grad_final
        run = _backward_of_operator if is_watched(ends) else _launch_backward
        found = iter(run(ends, saved, tensors, ctx.asked))
        given = [tensor is not None for tensor in tensors[: len(DIFFERENTIABLE)]]
        return None, None, *(next(found) if is_given else None for is_given in given), None


def _rounded(name: str, tensor: Tensor | None) -> Tensor | None:
    """Return the tensor as both passes read it: a bias is rounded once, and not where its gradient would be, too."""
    return tensor.to(torch.bfloat16) if tensor is not None and name in ("q_bias", "k_bias") else tensor


def _zeros_of_output(tensors: Tensors) -> Tensor:
    """Return a gradient of o for those who used the final state alone."""
    given: Any = dict(zip(TENSORS, tensors, strict=True))
    v, ranks = given["v"], given["psi"].shape[1:2] if given["phi"] is None else ()
    zeros: Tensor = v.new_zeros(*v.shape[:2], *ranks, *v.shape[2:])
    return zeros


def _with_gradients(run: Forward, tensors: Tensors, asked: Asked) -> Sequence[Tensor]:
    """Run the forward pass so that autograd can go back through it."""
    if not torch.is_grad_enabled():
        return run(tensors, asked)
    results: tuple[Tensor, ...] = _Pass.apply(run, asked, *tensors)  # type: ignore[no-untyped-call]
    return results


def _parted(arguments: tuple[Any, ...]) -> tuple[Tensors, Asked]:
    return arguments[: len(TENSORS)], arguments[len(TENSORS) :]


def _forward_of_operator(tensors: Tensors, asked: Asked) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        results: list[Tensor] = _forward(*tensors, *asked)
    return results


def _backward_of_operator(ends: Ends, saved: Sequence[Tensor], tensors: Tensors, asked: Asked) -> list[Tensor]:
    results: list[Tensor] = _backward(*ends, saved, *tensors, *asked)
    return results


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    tensors, asked = _parted(arguments)
    return _flat(_Shapes(tensors, asked), asked)


def _backward_shapes(
    grad_out: Tensor, final: Tensor | None, grad_final: Tensor | None, saved: list[Tensor], *rest: Any
) -> list[Tensor]:
    tensors, asked = _parted(rest)
    return _apart(_gradients(_Shapes(tensors, asked), (grad_out, final, grad_final), saved, tensors), tensors)


def _launch_backward_apart(
    grad_out: Tensor, final: Tensor | None, grad_final: Tensor | None, saved: list[Tensor], *rest: Any
) -> list[Tensor]:
    tensors, asked = _parted(rest)
    return _apart(_launch_backward((grad_out, final, grad_final), saved, tensors, asked), tensors)


def _apart(grads: list[Tensor], tensors: Tensors) -> list[Tensor]:
    """Return the gradients without memory in common, as an operator must: those of the weights are parts of sums."""
    names = (name for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False) if tensor is not None)
    own = (*TIME_FIRST, *TIME_LAST)
    return [grad if name in own else grad.clone() for name, grad in zip(names, grads, strict=True)]


def _operator(name: str, arguments: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Define an operator that returns tensors, and return it.

    Not by torch.library.custom_op: on the machine of the receipts its wrappers took 2.0 of the 3.1 ms of host time of a
    forward and backward pass.
    """
    _LIBRARY.define(f"{name}({arguments}) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", shapes, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _LIBRARY.ns), name).default


_LIBRARY: Any = torch.library.Library("ablate", "DEF")  # type: ignore[no-untyped-call]
_forward = _operator("mamba3_scan", _ARGUMENTS, lambda *given: _launch_forward(*_parted(given)), _forward_shapes)
_backward = _operator(
    "mamba3_scan_backward",
    f"Tensor grad_out, Tensor? final, Tensor? grad_final, Tensor[] saved, {_ARGUMENTS}",
    _launch_backward_apart,
    _backward_shapes,
)
_LIBRARY.impl("mamba3_scan", lambda *given: list(_with_gradients(_forward_of_operator, *_parted(given))), "Autograd")
