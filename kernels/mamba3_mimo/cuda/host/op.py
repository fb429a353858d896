"""The CUDA scan as two torch operators, forward and backward, so that torch.compile takes it without a graph break.

An operator's arguments are the tensors of `ScanInputs`, then the switches: the schema is made from both.
Its fake kernel is the same host code on tensors without data, with nothing launched, so shapes and strides cannot
drift from those of the real one. The facts are recorded here, when the kernels run: under torch.compile too.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import facts
from kernels.backends import Lane
from kernels.errors import KernelUnsupported
from kernels.mamba3_mimo.cuda.host import attest
from kernels.mamba3_mimo.cuda.host.beyond import Beyond, beyond_of
from kernels.mamba3_mimo.cuda.host.compiled import Direction, build, kernel
from kernels.mamba3_mimo.cuda.host.lengths import chosen
from kernels.mamba3_mimo.cuda.host.scan import TIME_FIRST, TIME_LAST, Scan, laid_out
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.mamba3_mimo.inputs import DIFFERENTIABLE, OPTIONAL, ScanInputs
from kernels.mamba3_mimo.support import supports
from kernels.scan import ScanFact, ScanSwitches

SWITCHES = {field.name: type(field.default).__name__ for field in fields(ScanSwitches) if field.name != "lane"}
"""Switch -> its type in the operators' schema; their lane is cuda."""
THIS_LANE = ScanSwitches(lane=Lane.CUDA)
"""What is asked of a device before every pass: made once."""
CAPABILITY = (9, 0)
"""Compute capability that the kernels are compiled for."""
PER_PASS = (ScanFact.SOURCE_HASH, ScanFact.BINARY_HASH)
"""Facts that the two passes record apart: their values always differ."""

_ARGUMENTS = ", ".join((
    *(f"Tensor{'?' if name in OPTIONAL else ''} {name}" for name in DIFFERENTIABLE),
    "Tensor? segment_ids",
    "bool angles_cumulated",
    "bool return_final_state",
    *(f"{kind} {name}" for name, kind in SWITCHES.items()),
))  # fmt: skip


def scan(inputs: ScanInputs, switches: ScanSwitches, return_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """Return (o, final state [B,H,N,P] if asked for); o is bfloat16 [B,S,H,P], or [B,S,R,H,P] without phi.

    q, k, v and z are bfloat16, all else at most float32; the kernels round the biases to bfloat16 before they add them.
    The same kernels run with and without gradients: a validation pass compiles nothing. Raises KernelUnsupported with
    the reason when no kernel does this combination.
    """
    reason = dtype_refusal(inputs)
    if reason is not None:
        raise KernelUnsupported(reason)
    chosen = [getattr(switches, name) for name in SWITCHES]
    tensors = [_prepared(name, getattr(inputs, name)) for name in DIFFERENTIABLE]
    asked = (inputs.segment_ids, inputs.angles_cumulated, return_final_state, *chosen)
    out, *rest = _forward(*tensors, *asked)
    return out, rest[0] if return_final_state else None


def dtype_refusal(inputs: ScanInputs) -> str | None:
    """Return which tensor the kernels would round, or None when they take all as they are."""
    if inputs.v.dtype != torch.bfloat16:
        return f"q, k, v and z have dtype {inputs.v.dtype}; allowed for lane 'cuda': torch.bfloat16"
    wide = (name for name in inputs.names if torch.finfo(getattr(inputs, name).dtype).bits > 32)
    return next((f"{name} has dtype torch.float64; allowed for lane 'cuda': torch.float32" for name in wide), None)


@lru_cache(maxsize=8)
def gpu_refusal(index: int) -> str | None:
    """Return why GPU `index` cannot run the kernels, or None when it is of the kind that they are compiled for."""
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) == CAPABILITY:
        return None
    name = torch.cuda.get_device_name(index)
    return f"{name} has compute capability {major}.{minor}; allowed for lane 'cuda': 9.0 (H100, H200)"


def _prepared(name: str, tensor: Tensor | None) -> Tensor | None:
    """Return the tensor in the layout that the kernels read, so that both passes share one copy.

    Also in their dtype, but for the biases, whose gradients would be rounded to it.
    """
    dtype = torch.bfloat16 if name in ("q", "k", "v", "z") else torch.float32
    return None if tensor is None else laid_out(tensor, dtype)


_RETURN_FINAL_STATE = len(DIFFERENTIABLE) + 2
"""Place of that argument."""


def _read(arguments: tuple[Any, ...]) -> tuple[ScanInputs, Variant]:
    """Return an operator's arguments as what they were made from."""
    at = len(DIFFERENTIABLE)
    tensors = dict(zip(DIFFERENTIABLE, arguments[:at], strict=True))
    segment_ids, angles_cumulated, _, *switches = arguments[at:]
    inputs = ScanInputs.unchecked(**tensors, segment_ids=segment_ids, angles_cumulated=angles_cumulated)
    return inputs, _variant(*switches)


@lru_cache(maxsize=256)
def _variant(*switches: Any) -> Variant:
    return Variant(**dict(zip(SWITCHES, switches, strict=True)))


class _Launched(Scan):
    """A scan whose kernels run, and say afterwards what they are."""

    def __init__(self, direction: Direction, arguments: tuple[Any, ...]) -> None:
        inputs, variant = _read(arguments)
        device = inputs.v.device
        reason = supports(THIS_LANE, device.type)
        if reason is None and device.type == "cuda":
            reason = gpu_refusal(device.index)
        if reason is not None:
            raise KernelUnsupported(reason)
        self._direction = direction
        self._launched: list[str] = []
        self._touched: list[int] = []
        self._handed: int | None = None
        super().__init__(inputs, variant)
        build(direction, self.shape, self.variant)

    def run(self, name: str, *arguments: Tensor | int) -> None:
        """Launch one kernel."""
        super().run(name, *arguments)
        self._launched.append(name)
        if name in attest.PASSES and isinstance(arguments[0], Tensor):
            self._handed = arguments[0].shape[1]
        if facts.collecting():
            self._touched += [tensor.data_ptr() for tensor in arguments if isinstance(tensor, Tensor)]

    def record(self, saved: Sequence[Tensor]) -> None:
        """Record what ran, as its code shows it; `saved` are the tensors kept between the two passes."""
        if not facts.collecting():
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

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__(*_read(arguments))

    def check(self, variant: Variant) -> None:
        """Refuse nothing: the scan that runs says why, where torch.compile does not wrap the reason."""

    def aligned(self, tensor: Tensor) -> Tensor:
        """Return the tensor: it has no address."""
        return tensor

    def run(self, name: str, *arguments: Tensor | int) -> None:
        """Launch nothing."""


def _launch_forward(*arguments: Any) -> list[Tensor]:
    # a compiled kernel leaves its own device as the current one
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        launched = _Launched("forward", arguments)
        results = _flat(launched, arguments)
    launched.record(results[-len(launched.saved) :])
    return results


def _flat(made: Scan, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return [o, the final state if it is asked for, *what the backward pass needs]."""
    out, final, saved = made.forward(return_final_state=arguments[_RETURN_FINAL_STATE])
    return [out, *saved] if final is None else [out, final, *saved]


def _launch_backward(
    grad_out: Tensor, final: Tensor | None, grad_final: Tensor | None, saved: list[Tensor], *arguments: Any
) -> list[Tensor]:
    with torch.cuda.device_of(grad_out):  # type: ignore[no-untyped-call]
        launched = _Launched("backward", arguments)
        grads = _gradients(launched, grad_out, beyond_of(final, grad_final), saved, arguments)
    launched.record(saved)
    return grads


def _gradients(
    made: Scan, grad_out: Tensor, beyond: Beyond | None, saved: list[Tensor], arguments: tuple[Any, ...]
) -> list[Tensor]:
    """Return one gradient for every tensor of `DIFFERENTIABLE` that is given, in its dtype.

    Those of the weights are parts of common sums, and an operator's results must not share memory: they are copied.
    """
    grads = made.backward(grad_out, saved, beyond)
    grads |= {name: grad.clone() for name, grad in grads.items() if name not in (*TIME_FIRST, *TIME_LAST)}
    given = zip(DIFFERENTIABLE, arguments[: len(DIFFERENTIABLE)], strict=True)
    asked = [(grads[name], tensor.dtype) for name, tensor in given if tensor is not None]
    return [grad if grad.dtype is dtype else grad.to(dtype) for grad, dtype in asked]


class _Pass(torch.autograd.Function):
    """The forward operator with the backward operator as its gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """Run the forward operator; keep the tensors among its arguments and all results but o."""
        output = _without_gradients(*arguments)
        ctx.told = 1 + arguments[_RETURN_FINAL_STATE]
        ctx.is_tensor = [isinstance(value, Tensor) for value in arguments]
        ctx.plain = [None if isinstance(value, Tensor) else value for value in arguments]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[ctx.told :])
        ctx.save_for_backward(*(value for value in arguments if isinstance(value, Tensor)), *output[1:])
        return tuple(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return one gradient per argument of the forward operator, None for what is not differentiable."""
        grad_out, grad_final = (*grads[: ctx.told], None)[:2]
        if grad_out is None and grad_final is None:
            return tuple(None for _ in ctx.plain)
        kept = iter(ctx.saved_tensors)
        both = zip(ctx.is_tensor, ctx.plain, strict=True)
        arguments = [next(kept) if is_tensor else plain for is_tensor, plain in both]
        final = next(kept) if ctx.told > 1 else None
        if grad_out is None:
            grad_out = _zeros_of_output(arguments)
        found = iter(_backward(grad_out, final, grad_final, list(kept), *arguments))
        at = len(DIFFERENTIABLE)
        return tuple(next(found) if given else None for given in ctx.is_tensor[:at]) + (None,) * (len(arguments) - at)


def _zeros_of_output(arguments: Sequence[Any]) -> Tensor:
    """Return a gradient of o for those who used the final state alone."""
    given = dict(zip(DIFFERENTIABLE, arguments, strict=False))
    v, ranks = given["v"], given["psi"].shape[1:2] if given["phi"] is None else ()
    zeros: Tensor = v.new_zeros(*v.shape[:2], *ranks, *v.shape[2:])
    return zeros


def _with_gradients(*arguments: Any) -> list[Tensor]:
    """Run the forward operator so that autograd can go back through it."""
    return list(_Pass.apply(*arguments)) if torch.is_grad_enabled() else _without_gradients(*arguments)  # type: ignore[no-untyped-call]


def _without_gradients(*arguments: Any) -> list[Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        results: list[Tensor] = _forward(*arguments)
    return results


def _forward_shapes(*arguments: Any) -> list[Tensor]:
    return _flat(_Shapes(arguments), arguments)


def _backward_shapes(
    grad_out: Tensor, final: Tensor | None, grad_final: Tensor | None, saved: list[Tensor], *arguments: Any
) -> list[Tensor]:
    return _gradients(_Shapes(arguments), grad_out, beyond_of(final, grad_final), saved, arguments)


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
_forward = _operator("mamba3_scan", _ARGUMENTS, _launch_forward, _forward_shapes)
_backward = _operator(
    "mamba3_scan_backward",
    f"Tensor grad_out, Tensor? final, Tensor? grad_final, Tensor[] saved, {_ARGUMENTS}",
    _launch_backward,
    _backward_shapes,
)
_LIBRARY.impl("mamba3_scan", _with_gradients, "Autograd")
