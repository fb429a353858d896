"""AdamW whose update of a matrix is one kernel, made by torch's compiler.

The kernel clips the gradient, moves the float32 master weights and both moments, and writes the weights that the next
step multiplies. These have the compute dtype, so in bfloat16 no pass rounds the weights, and none widens the gradients:
the gradient of a rounded weight has 16 bits before it is widened, so the numbers stay the same. Moments in bfloat16 are
rounded to nearest.

Only the linear maps of the blocks are updated so. Embedding, head, norms and small tensors stay with torch's fused
AdamW, which divides their gradients by the clipping factor in the same pass. Source of the update: Loshchilov and
Hutter (2019), "Decoupled Weight Decay Regularization".
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.config import OptimConfig
from model.layers.linear import Linear

EPS = 1e-8


class _Matrix(NamedTuple):
    master: Tensor
    """Float32."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rounded: Tensor | None
    """What the model multiplies; None where that is the master."""


class _Factors(NamedTuple):
    """Numbers of a step, as tensors without axes, because a compiled function would be compiled for each number."""

    divisor: Tensor
    """Of the gradients: at least 1."""
    kept: Tensor
    """Share of the weights that decay leaves."""
    rate: Tensor
    """Learning rate, without the bias of the first moment."""
    root: Tensor
    """Factor that takes the bias from the root of the second moment."""


class CompiledAdamW:
    """AdamW for a model whose linear maps have their weights in the compute dtype."""

    def __init__(
        self,
        model: nn.Module,
        maps: Sequence[Linear],
        config: OptimConfig,
        rest: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.AdamW],
    ) -> None:
        """Round the weights of `maps` to their compute dtype in place. `rest` returns the optimiser of all others."""
        self._config, self._maps = config, maps
        self._matrices = [_matrix(one, getattr(torch, config.moments)) for one in maps]
        self._flat = [_Matrix(*(None if slot is None else _flat(slot) for slot in one)) for one in self._matrices]  # type: ignore[arg-type]
        own = {id(one.weight) for one in maps}
        self.adamw = rest([(name, p) for name, p in model.named_parameters() if id(p) not in own])
        self._steps = torch.zeros((), device=next(model.parameters()).device)
        self.grad_scale: Tensor | None = None
        """Divisor of all gradients, at least 1. Whoever steps sets it, and `found_inf`, before."""
        self.found_inf: Tensor | None = None
        self.compiled = False
        """Whether torch's compiler traced all updates of the last step."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all others. Their learning rate is that of the matrices, too."""
        return self.adamw.param_groups

    @property
    def matrices(self) -> list[dict[str, Any]]:
        """State of each matrix of the blocks."""
        return [_state(matrix) for matrix in self._matrices]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """State by parameter."""
        own: dict[Tensor, dict[str, Any]] = dict(zip((one.weight for one in self._maps), self.matrices, strict=True))
        return {**own, **self.adamw.state}

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters by their gradients."""
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()
        self._steps += 1
        factors, betas, update = self._factors(), (self._config.beta1, self._config.beta2), _compiler()
        traced = []
        for one, matrix in zip(self._maps, self._flat, strict=True):
            if one.weight.grad is not None:
                traced.append(update(matrix, _flat(one.weight.grad.contiguous()), factors, betas))
        self.compiled = bool(traced) and all(traced)

    def _factors(self) -> _Factors:
        rate = torch.zeros_like(self._steps) + self.param_groups[0]["lr"]
        return _Factors(
            divisor=torch.ones_like(self._steps) if self.grad_scale is None else self.grad_scale,
            kept=1 - rate * self._config.weight_decay,
            rate=rate / (1 - self._config.beta1**self._steps),
            root=(1 - self._config.beta2**self._steps).rsqrt(),
        )

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop or zero all gradients."""
        self.adamw.zero_grad(set_to_none=set_to_none)
        for one in self._maps:
            if set_to_none:
                one.weight.grad = None
            elif one.weight.grad is not None:
                one.weight.grad.zero_()


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor with one axis over the memory of a contiguous one.

    It is not a view, because a compiled function is compiled again for each shape behind a view.
    """
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),))  # type: ignore[call-overload,no-any-return]


def _matrix(linear: Linear, moments: torch.dtype) -> _Matrix:
    master = linear.weight.detach()
    exp_avg, exp_avg_sq = (torch.zeros_like(master, dtype=moments) for _ in range(2))
    if linear.compute_dtype == torch.float32:
        return _Matrix(master, exp_avg, exp_avg_sq, None)
    linear.weight = nn.Parameter(master.to(linear.compute_dtype))
    return _Matrix(master, exp_avg, exp_avg_sq, linear.weight.detach())


def _state(matrix: _Matrix) -> dict[str, Any]:
    moments = {"exp_avg": matrix.exp_avg, "exp_avg_sq": matrix.exp_avg_sq}
    return moments if matrix.rounded is None else {"master": matrix.master, **moments}


@cache
def _compiler() -> Callable[..., bool]:
    compiled: Callable[..., bool] = torch.compile(_update, dynamic=True, fullgraph=True)
    return compiled


def _update(matrix: _Matrix, gradient: Tensor, factors: _Factors, betas: tuple[float, float]) -> bool:
    """Update one matrix [N] in place by its gradient [N]; return whether torch's compiler traced this function."""
    beta1, beta2 = betas
    clipped = gradient.float() / factors.divisor
    first = matrix.exp_avg.float() * beta1 + clipped * (1 - beta1)
    second = matrix.exp_avg_sq.float() * beta2 + clipped * clipped * (1 - beta2)
    moved = matrix.master * factors.kept - factors.rate * first / (second.sqrt() * factors.root + EPS)
    matrix.exp_avg.copy_(first)
    matrix.exp_avg_sq.copy_(second)
    matrix.master.copy_(moved)
    if matrix.rounded is not None:
        matrix.rounded.copy_(moved)
    return torch.compiler.is_compiling()
