"""The tensors of a problem: values in the range that the model uses, documents, and their places in memory.

Values are made on the CPU, so that a problem found on a GPU has the same numbers in the interpreter. Decays:

- initial: the model's initialisation, dt log-uniform in [0.001, 0.1] with a learned share, A of order 1
- benchmark: the official tests, dt = softplus(n - 3), adt = -dt * u
- weak: A in [-1e-3, -1e-4]: nothing is forgotten within a row
- strong: dt up to 5, adt down to -60: nothing survives a few tokens
- mixed: every head its own dt in [1e-4, 3] and A in [-16, -1e-4]

Letters: see ../inputs.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ablate.kernels.mamba3_mimo.inputs import DIFFERENTIABLE, ScanInputs
from tests.kernels.fuzz.problems import Layout, ScanProblem

OPERANDS = ("q", "k", "v", "z")
"""Tensors of the problem's dtype. The others are float32."""
ID_STRIDE = 7
"""Distance between the ids of two documents. An id is a name and may be negative."""


def sizes(p: ScanProblem) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the problem's tensors and of grad_out."""
    heads = 1 if p.shared_angles else p.H
    given: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k"), (p.B, p.S, p.R, p.G, p.N))
    given |= dict.fromkeys(("v", "z"), (p.B, p.S, p.H, p.P)) | dict.fromkeys(("q_bias", "k_bias"), (p.H, p.R, p.N))
    given |= dict.fromkeys(("psi", "zeta", "phi"), (p.H, p.R, p.P)) | {"D": (p.H,)}
    given |= dict.fromkeys(("adt", "dt", "trap"), (p.B, p.H, p.S)) | {"angles": (p.B, p.S, heads, p.angles)}
    if p.started:
        given["entering"] = (p.B, p.H, p.N, p.P)
    ranks = (p.R,) if "phi" in p.without else ()
    return {name: size for name, size in given.items() if name not in p.without} | {
        "grad_out": (p.B, p.S, *ranks, p.H, p.P)
    }


def shapes_only(p: ScanProblem) -> ScanInputs:
    """Return the problem's tensors without data. Raises ShapeError if they do not fit together."""
    dtypes = dict.fromkeys(OPERANDS, getattr(torch, p.dtype))
    tensors: dict[str, Any] = {
        name: torch.empty(size, dtype=dtypes.get(name, torch.float32), device="meta")
        for name, size in sizes(p).items()
        if name != "grad_out"
    }
    ids = torch.empty((p.B, p.S), dtype=torch.int64, device="meta") if p.documents > 1 else None
    return ScanInputs(**tensors, segment_ids=ids, angles_cumulated=p.cumulated)


def made(p: ScanProblem, device: str | torch.device = "cpu") -> tuple[ScanInputs, Tensor]:
    """Return the inputs of a problem and the gradient of its output. Raises ShapeError if they do not fit."""
    gen = torch.Generator().manual_seed(p.seed)
    values = _values(p, gen)
    values = {name: value.to(getattr(torch, p.dtype)) if name in (*OPERANDS, "grad_out") else value.float()
              for name, value in values.items()}  # fmt: skip
    if p.documents > 1:
        values["segment_ids"] = _segment_ids(p, gen)
    laid = {name: placed(value, p.layouts.get(name, "plain"), device) for name, value in values.items()}
    grad_out = laid.pop("grad_out")
    given: Mapping[str, Any] = {name: laid.get(name) for name in (*DIFFERENTIABLE, "segment_ids")}
    return ScanInputs(**given, angles_cumulated=p.cumulated), grad_out


def final_gradient(p: ScanProblem, device: str | torch.device = "cpu") -> Tensor | None:
    """Return the gradient of the final state, float32 [B,H,N,P], or None."""
    if not p.ended:
        return None
    return torch.randn((p.B, p.H, p.N, p.P), generator=torch.Generator().manual_seed(p.seed + 1)).to(device)


def _values(p: ScanProblem, gen: torch.Generator) -> dict[str, Tensor]:
    values = {name: torch.randn(size, generator=gen) for name, size in sizes(p).items()}
    dt = _step_sizes(p, gen)
    values |= {"dt": dt, "adt": _decays(p, dt, gen)}
    for name in ("q_bias", "k_bias", "zeta"):
        if name in values:
            values[name] = 1 + values[name] / 2
    for name in ("psi", "phi"):
        if name in values:
            values[name] = (1 + values[name] / 2) / p.R
    values["angles"] *= 10 ** _uniform((), -1, 0.5, gen)
    if p.cumulated:
        values["angles"] = (math.pi * values["angles"].tanh() * dt.transpose(1, 2).unsqueeze(-1)).double().cumsum(1)
    if p.layouts.get("grad_out") == "expanded":  # what `o.sum().backward()` gives
        values["grad_out"] = torch.ones(()).expand(values["grad_out"].shape)
    return values


def _step_sizes(p: ScanProblem, gen: torch.Generator) -> Tensor:
    """Return dt [B,H,S]."""
    noise = torch.randn((p.B, p.H, p.S), generator=gen)
    if p.decay == "strong":
        return softplus(2 + noise)
    if p.decay == "benchmark":
        return softplus(noise - 3)
    lowest, highest = (-4.0, 0.5) if p.decay == "mixed" else (-3.0, -1.0)
    typical = 10 ** _uniform((p.H, 1), lowest, highest, gen)
    return softplus(noise + typical.expm1().log())


def _decays(p: ScanProblem, dt: Tensor, gen: torch.Generator) -> Tensor:
    """Return adt [B,H,S]."""
    noise = torch.randn(dt.shape, generator=gen)
    heavy = torch.where(noise >= 0, 1 + noise, 1 / (1 - noise))
    if p.decay == "benchmark":
        return -dt * torch.rand(dt.shape, generator=gen)
    rate = {
        "initial": heavy,
        "weak": 10 ** _uniform(dt.shape, -4, -3, gen),
        "strong": 1 + 4 * noise.abs(),
        "mixed": heavy * 10 ** _uniform((p.H, 1), -4, 0.8, gen),
    }[p.decay]
    return -dt * rate


def _uniform(size: tuple[int, ...], low: float, high: float, gen: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(size, generator=gen)


def _segment_ids(p: ScanProblem, gen: torch.Generator) -> Tensor:
    """Return [B,S] ids that neither start at 0 nor rise."""
    starts = torch.zeros(p.B, p.S, dtype=torch.int64)
    for row in starts:
        places = torch.randperm(max(p.S - 1, 0), generator=gen) + 1
        if p.cuts == "edges":
            places = places[places % 8 == 0]
        if p.cuts == "single" and p.S > 1:
            first = int(torch.randint(1, p.S, (1,), generator=gen))
            places = torch.arange(first, p.S)
        row[places[: p.documents - 1]] = 1
    return 3 - ID_STRIDE * starts.cumsum(1)


def placed(value: Tensor, layout: Layout, device: str | torch.device) -> Tensor:
    """Return the same numbers on `device`, lying in memory as `layout` says; gaps are NaN, of integers 0.

    permuted: axes in reverse order; sliced: columns of a wider tensor, as of a fused projection; strided: every second
    number; offset: contiguous, one number behind where an allocation starts.
    """
    if layout == "expanded" and value.numel():
        return value[(0,) * value.dim()].to(device).expand(value.shape)
    value = value.to(device)
    if layout == "permuted":
        axes = tuple(reversed(range(value.dim())))
        return value.permute(axes).contiguous().permute(axes)
    if layout == "plain" or not value.numel():
        return value.contiguous()
    gap = float("nan") if value.is_floating_point() else 0
    *before, last = value.shape
    if layout == "offset":
        view = value.new_full((value.numel() + 1,), gap)[1:].view(value.shape)
    elif layout == "strided":
        view = value.new_full((*before, 2 * last), gap)[..., ::2]
    else:
        view = value.new_full((*before, last + 5), gap)[..., 3 : 3 + last]
    return view.copy_(value)
