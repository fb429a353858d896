"""Random problems of the scan in the distribution of the official tests, and functions that run them on any lane."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ablate.kernels.errors import KernelError
from ablate.kernels.mamba3_mimo import mamba3_mimo
from ablate.kernels.mamba3_mimo.inputs import ScanInputs
from ablate.kernels.scan_switches import ScanSwitches

Run: TypeAlias = Callable[[ScanInputs], tuple[Tensor, Tensor]]
"""One way to run the scan: inputs -> (o, final state)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem."""

    B: int = 2
    """Batch."""
    S: int = 512
    """Tokens per row."""
    H: int = 4
    """Value heads."""
    G: int = 1
    """Groups sharing q and k."""
    N: int = 64
    """State size."""
    P: int = 64
    """Head width."""
    R: int = 4
    """MIMO rank."""
    rope: float = 0.5
    """Share of the state that is rotated: 0.5 or 1."""
    documents: int = 1
    """Documents per row."""
    seed: int = 0
    """Seed of the inputs."""
    cumulated: bool = False
    """Whether the angles are already cumulated."""
    shared_angles: bool = False
    """Whether all heads share one set of angles."""
    without: tuple[str, ...] = ()
    """Optional tensors to leave out."""
    started: bool = False
    """Whether a state enters the rows."""
    ended: bool = False
    """Whether the final state has a gradient, besides the output."""
    gradients: bool = True
    """Whether the problem includes the backward pass."""


def make_inputs(case: Case, device: str = "cuda") -> ScanInputs:
    """Return random inputs.

    q, k, v and z are bf16, as the kernels take them. trap is float32 with bf16 values, because the official kernels
    take bf16 and all lanes must read the same numbers.
    """
    gen = torch.Generator(device=device).manual_seed(case.seed)
    B, S, H, G, N, P, R = case.B, case.S, case.H, case.G, case.N, case.P, case.R

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=gen, device=device)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=gen, device=device)

    dt = torch.nn.functional.softplus(-3 + normal(B, H, S))
    segments = None
    if case.documents > 1:
        cuts = uniform(B, S).argsort(1)[:, : case.documents - 1]
        segments = torch.zeros(B, S, dtype=torch.int64, device=device).scatter_(1, cuts, 1).cumsum(1)
    tensors: dict[str, Any] = {
        "q": normal(B, S, R, G, N).bfloat16(), "k": normal(B, S, R, G, N).bfloat16(),
        "v": normal(B, S, H, P).bfloat16(), "z": normal(B, S, H, P).bfloat16(),
        "q_bias": normal(H, R, N), "k_bias": normal(H, R, N), "psi": normal(H, R, P) / R, "zeta": normal(H, R, P),
        "phi": normal(H, R, P) / R, "D": normal(H), "adt": -dt * uniform(B, H, S), "dt": dt,
        "trap": uniform(B, H, S).bfloat16().float(),
        "angles": uniform(B, S, 1 if case.shared_angles else H, int(N * case.rope) // 2),
    }  # fmt: skip
    if case.started:
        tensors["entering"] = normal(B, H, N, P)
    for name in case.without:
        tensors.pop(name, None)
    return ScanInputs(**tensors, segment_ids=segments, angles_cumulated=case.cumulated)


def make_grad(inputs: ScanInputs, seed: int) -> Tensor:
    """Return a random bf16 gradient of o: [B,S,H,P], or [B,S,R,H,P] without phi."""
    gen = torch.Generator(device=inputs.v.device).manual_seed(seed)
    ranks = inputs.psi.shape[1:2] if inputs.phi is None else ()
    size = (*inputs.v.shape[:2], *ranks, *inputs.v.shape[2:])
    return torch.randn(size, generator=gen, device=inputs.v.device).bfloat16()


def scanned(switches: ScanSwitches) -> Run:
    """Return a function that runs the scan with `switches`."""

    def run(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
        out, state = mamba3_mimo(inputs, switches, return_final_state=True)
        if state is None:
            raise KernelError("the scan returned no final state although the call requested it")
        return out, state.state

    return run


def outputs(
    run: Run, inputs: ScanInputs, grad_out: Tensor | None, grad_state: Tensor | None = None
) -> dict[str, Tensor]:
    """Return {out, state} of `run`; with `grad_out` also the gradient of every tensor by name.

    `grad_state` is the gradient of the final state, None for none.
    """
    if grad_out is None:
        with torch.no_grad():
            out, state = run(inputs)
        return {"out": out, "state": state}
    leaves = tuple(t.detach().requires_grad_() for t in inputs.tensors())
    results = run(inputs.with_tensors(leaves))
    out, state = results
    used = 1 if grad_state is None else 2
    grads = torch.autograd.grad(results[:used], leaves, (grad_out, grad_state)[:used])
    return {"out": out.detach(), "state": state.detach(), **dict(zip(inputs.names, grads, strict=True))}
