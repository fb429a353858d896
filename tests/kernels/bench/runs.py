"""Timed functions: one problem on one lane, or attention beside it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.mamba3_mimo import mamba3_mimo, peer
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.scan_switches import ScanSwitches
from tests.kernels.problem import Case, make_grad, make_inputs

Passes: TypeAlias = Literal["forward", "both"]
Run: TypeAlias = Callable[[], tuple[Tensor, ...]]
PASSES: tuple[Passes, ...] = ("forward", "both")
ATTENTION_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One problem as functions to call repeatedly."""

    forward: Run
    """Returns the results of the forward pass, without a graph for autograd."""
    both: Run
    """Returns the results and the gradients of the inputs."""
    names: tuple[str, ...]
    """Names of the results of `both`: out, then the tensors of ScanInputs with gradients."""
    inputs: ScanInputs | None = None
    """Inputs for the float64 reference; None for attention."""
    grad_out: Tensor | None = None
    """Gradient of o."""

    def run(self, passes: Passes) -> tuple[Tensor, ...]:
        """Run the forward pass or both passes."""
        return self.both() if passes == "both" else self.forward()


def scan(lane: Lane, case: Case, options: Mapping[str, Any]) -> Timed:
    """Return the scan of a problem on a lane: ours by its public function, the official one as its users call it."""
    inputs = make_inputs(case)
    inputs = inputs.with_tensors(tuple(t.requires_grad_() for t in inputs.tensors()))
    grad_out = make_grad(inputs, case.seed + 1)
    if lane is Lane.PEER:
        return _official(inputs, grad_out, chunk_size=options["chunk_size"])
    switches = ScanSwitches(lane=lane, **options)
    forward, both = _passes(lambda: (mamba3_mimo(inputs, switches).out,), inputs.tensors(), grad_out)
    return Timed(forward=forward, both=both, names=("out", *inputs.names), inputs=inputs, grad_out=grad_out)


def _official(inputs: ScanInputs, grad_out: Tensor, *, chunk_size: int) -> Timed:
    """Return the official function with its arguments as leaves in its own dtypes, without code of ours in between.

    As in training, it returns no final state.
    """
    refused = peer.refusal(inputs, chunk_size)
    if refused is None and peer.packing(inputs, chunk_size) is not None:
        refused = "lane 'peer': packed rows are not timed, because the lanes have different layouts for them"
    if refused is not None:
        raise KernelUnsupported(refused)
    function, arguments = peer.official().function, peer.arguments(inputs, None)
    leaves = {name: arguments[peer.NAMES[name]].detach().contiguous().requires_grad_() for name in inputs.names}
    arguments |= {peer.NAMES[name]: leaf for name, leaf in leaves.items()}

    def run() -> tuple[Tensor]:
        return (function(**arguments, chunk_size=chunk_size, dtype=torch.bfloat16, return_state=False),)

    forward, both = _passes(run, tuple(leaves.values()), grad_out)
    return Timed(forward=forward, both=both, names=("out", *inputs.names), inputs=inputs, grad_out=grad_out)


def attention(backend: str, case: Case) -> Timed:
    """Return causal attention with the heads, width and tokens of `case` by a backend of torch."""
    size = (case.B, case.H, case.S, case.P)
    q, k, v, grad_out = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = tuple(t.requires_grad_() for t in (q, k, v))

    def attend() -> tuple[Tensor]:
        with sdpa_kernel(ATTENTION_BACKENDS[backend]):
            return (torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),)

    forward, both = _passes(attend, leaves, grad_out)
    return Timed(forward=forward, both=both, names=("out", "q", "k", "v"))


def _passes(run: Run, leaves: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Run, Run]:
    """Return the forward pass and both passes of `run`, whose first result is o."""

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return run()

    def both() -> tuple[Tensor, ...]:
        results = run()
        grads = torch.autograd.grad(results[0], leaves, grad_out)
        # drop all of autograd's nodes: they belong to this stream, and a CUDA graph is captured on another one
        return *(result.detach() for result in results), *grads

    return forward, both
