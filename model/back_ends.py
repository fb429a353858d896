"""Small problems that show whether a back end works on a device: forward and backward, against float64.

A worker on a GPU runs each in a process of its own, at its first start with these versions. An import alone proves
nothing: a package can lack a kernel for this GPU, or compute wrong gradients for it.
"""

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional

from ablate.kernels.errors import KernelUnsupported
from ablate.model.config import ProjectionKind
from ablate.model.layers.attention import ATTEND, PLAIN, document_mask
from ablate.model.layers.linear import NORM_EPS, Linear, QuackRMSNorm
from ablate.model.layers.recurrence import fused, recurrence
from ablate.model.training.loss import KINDS, cross_entropy

LIMIT, FLOAT8_LIMIT, FLOAT32_LIMIT = 0.02, 0.15, 1e-4
"""Largest relative errors of results in bfloat16, float8 and float32, as root mean squares."""


def problem(name: str, device: torch.device) -> str | None:
    """Run the small problem of back end `name`, such as "attention=fa4"; return what is wrong, None if it works."""
    gate, _, value = name.partition("=")
    torch.use_deterministic_algorithms(True)
    try:
        error, limit = PROBLEMS[gate](value, device)
    except KernelUnsupported as refusal:
        return f"refused: {refusal}"
    return None if error <= limit else f"wrong: relative error {error:.2g}; allowed: {limit:g}"


def _attention(backend: str, device: torch.device) -> tuple[float, float]:
    q, k, v, upstream = (_normal((2, 300, 3, 64), device, seed) for seed in range(4))
    ids_BS = (torch.arange(300, device=device) // 70).expand(2, 300).contiguous()
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = ATTEND[backend](q, k, v, ids_BS, PLAIN)
    got = [out, *torch.autograd.grad(out, leaves, upstream)]
    wide = _wide(leaves)
    scores = torch.einsum("bthe,buhe->bhtu", wide[0], wide[1]) * 64**-0.5
    weights = scores.masked_fill(~document_mask(ids_BS), -torch.inf).softmax(-1)
    exact = torch.einsum("bhtu,buhe->bthe", weights, wide[2])
    return _error(got, [exact, *torch.autograd.grad(exact, wide, upstream.double())]), LIMIT


def _loss(kind: str, device: torch.device) -> tuple[float, float]:
    hidden, weight = _normal((1, 300, 128), device, 0), 0.1 * _normal((1024, 128), device, 1).float()
    targets = torch.arange(300, device=device).mul(37).remainder(1024).unsqueeze(0)
    valid = torch.arange(300, device=device).remainder(5).ne(0).unsqueeze(0)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = cross_entropy(hidden, weight, targets, valid, next(known for known in KINDS if known == kind))
    got = [loss, *torch.autograd.grad(-2.5 * loss, (hidden, weight))]
    wide = [hidden.detach().double().requires_grad_(), weight.detach().bfloat16().double().requires_grad_()]
    losses = functional.cross_entropy((wide[0] @ wide[1].T)[0], targets[0], reduction="none")
    exact = losses.where(valid[0], 0).sum() / valid.sum()
    return _error(got, [exact, *torch.autograd.grad(-2.5 * exact, wide)]), LIMIT


def _recurrence(_value: str, device: torch.device) -> tuple[float, float]:
    """Two heads over two documents of 70 tokens."""
    shapes = (1, 140, 64), (1, 140, 64), (1, 140, 2, 16), (1, 140, 2), (2, 16, 16)
    leaves = [0.3 * _normal(shape, device, seed).float() for seed, shape in enumerate(shapes)]
    leaves[3] = torch.sigmoid(leaves[3])
    for leaf in leaves:
        leaf.requires_grad_()
    starts = torch.arange(140, device=device).eq(70).unsqueeze(0)
    wide, upstream = _wide(leaves), _normal((1, 140, 2, 16), device, 5).float()
    out, exact = fused(*[*leaves, starts]), recurrence(*wide, starts)
    got = [out, *torch.autograd.grad(out, leaves, upstream)]
    return _error(got, [exact, *torch.autograd.grad(exact, wide, upstream.double())]), FLOAT32_LIMIT


def _projections(products: str, device: torch.device) -> tuple[float, float]:
    kind = next(known for known in get_args(ProjectionKind) if known == products)
    layer = Linear(128, 192, compute_dtype=torch.bfloat16, products=kind).to(device)
    with torch.no_grad():
        layer.weight.copy_(0.1 * _normal((192, 128), device, 0).float())
    x, upstream = _normal((2, 64, 128), device, 1).requires_grad_(), _normal((2, 64, 192), device, 2)
    out = layer(x)
    got = [out, *torch.autograd.grad(out, (x, layer.weight), upstream)]
    wide = _wide((x, layer.weight))
    exact = functional.linear(*wide)
    return _error(got, [exact, *torch.autograd.grad(exact, wide, upstream.double())]), FLOAT8_LIMIT


def _norm_kernels(_value: str, device: torch.device) -> tuple[float, float]:
    """Norms of a float32 stream without and with an update, and of a stream in bfloat16."""
    norm = QuackRMSNorm(256, compute_dtype=torch.bfloat16).to(device)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.1 * _normal((256,), device, 0).float())
    x, update, of_sum, upstream = (_normal((2, 60, 256), device, seed) for seed in range(1, 5))
    errors = []
    for stream, added in ((x.float(), None), (x.float(), update), (x, update)):
        leaves = [t.detach().requires_grad_() for t in (stream, added) if t is not None]
        wide = _wide([*leaves, norm.weight])
        summed, normed = norm.of_sum(leaves[0], leaves[1] if len(leaves) > 1 else None)
        exact = sum(wide[1:-1], wide[0])
        exact_normed = functional.rms_norm(exact, (256,), wide[-1], NORM_EPS)
        got = torch.autograd.grad((summed, normed), [*leaves, norm.weight], (of_sum.to(stream.dtype), upstream))
        wanted = torch.autograd.grad((exact, exact_normed), wide, (of_sum.double(), upstream.double()))
        errors.append(_error([summed, normed, *got], [exact, exact_normed, *wanted]))
    return max(errors), LIMIT


def _cuda_graph(_value: str, device: torch.device) -> tuple[float, float]:
    """Update a matrix three times, eagerly and by one recorded step; the results are equal to the bit."""
    if device.type != "cuda":
        raise KernelUnsupported(f"CUDA graphs run on NVIDIA GPUs; the device is {device.type}")
    start = [_normal((64, 64), device, 0).float().requires_grad_() for _ in range(2)]
    batches = [_normal((32, 64), device, seed).float() for seed in range(1, 6)]
    rates = [torch.tensor(1e-2, device=device) for _ in start]
    optimizers = [torch.optim.AdamW([w], lr=r, fused=True, capturable=True) for w, r in zip(start, rates, strict=True)]

    def step(place: int, batch: Tensor) -> None:
        (batch @ start[place]).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizers[place].step()
        optimizers[place].zero_grad(set_to_none=True)

    for place in range(2):
        step(place, batches[0])
    static, graph = batches[1].clone(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    try:
        with torch.cuda.graph(graph):
            step(1, static)
    except RuntimeError as error:
        raise KernelUnsupported(f"a step cannot be recorded: {error}") from error
    for batch in batches[1:]:
        step(0, batch)
        static.copy_(batch)
        graph.replay()
    return float((start[0] - start[1]).abs().max()), 0.0


PROBLEMS: dict[str, Callable[[str, torch.device], tuple[float, float]]] = {
    "attention": _attention,
    "loss": _loss,
    "recurrence": _recurrence,
    "projections": _projections,
    "norm_kernels": _norm_kernels,
    "cuda_graph": _cuda_graph,
}
"""Gate -> function that runs a value's problem and returns the error and its limit. Raises KernelUnsupported."""


def _normal(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def _error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative error; infinite where a result is not finite."""
    errors = [float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in zip(got, exact, strict=True)]
    return max(error if error == error else float("inf") for error in errors)
