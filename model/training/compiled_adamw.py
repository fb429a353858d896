"""AdamW whose update of a matrix is one kernel, made by torch's compiler.

The kernel clips the gradient, moves the float32 master weights and both moments, and writes the weights that the next
step multiplies. These have the compute dtype, so in bfloat16 no pass rounds the weights, and none widens the gradients:
the gradient of a rounded weight has 16 bits before it is widened, so the numbers stay the same. Only projections in
float8 round a weight twice then. Moments in bfloat16 are rounded to nearest.

Only the linear maps of the blocks are updated so. Embedding, head, norms and small tensors stay with torch's fused
AdamW, which divides their gradients by the clipping factor in the same pass. Source of the update: Loshchilov and
Hutter (2019), "Decoupled Weight Decay Regularization".
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ablate.model.config import OptimConfig
from ablate.model.layers.linear import Linear

EPS = 1e-8
LINE = 16
"""Numbers of a line, see `_lines`."""


class _Matrix(NamedTuple):
    master: Tensor
    """Float32."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rounded: Tensor | None
    """What the model multiplies; None where that is the master."""


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
        """Update all parameters by their gradients.

        The bias of the moments counts every step, also those in which a matrix has no gradient.
        """
        self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        self.adamw.step()
        self._steps += 1
        rate, betas = torch.zeros_like(self._steps) + self.param_groups[0]["lr"], self._betas
        divisor = torch.ones_like(self._steps) if self.grad_scale is None else self.grad_scale
        steps = self._steps.double()  # the difference to 1 of a beta near 1 would lose its digits in float32
        sizes = torch.stack([rate / (1 - betas[0] ** steps), (1 - betas[1] ** steps).rsqrt()]).float()
        kept = 1 - rate * self._config.weight_decay
        traced = []
        for one, matrix in zip(self._maps, self._matrices, strict=True):
            if one.weight.grad is not None:
                traced.append(_run(matrix, one.weight.grad, divisor, kept, sizes, betas))
        self.compiled = bool(traced) and all(traced)

    @torch.no_grad()
    def compile(self) -> None:
        """Compile the updates, before the first step. They run with a learning rate of 0, which changes nothing."""
        divisor, kept = (torch.ones_like(self._steps) for _ in range(2))
        sizes = torch.tensor([0.0, 1.0], device=self._steps.device)
        for one, matrix in zip(self._maps, self._matrices, strict=True):
            _run(matrix, torch.zeros_like(one.weight), divisor, kept, sizes, self._betas)

    @property
    def _betas(self) -> tuple[float, float]:
        return self._config.beta1, self._config.beta2

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop or zero all gradients."""
        self.adamw.zero_grad(set_to_none=set_to_none)
        for one in self._maps:
            if set_to_none:
                one.weight.grad = None
            elif one.weight.grad is not None:
                one.weight.grad.zero_()


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


def _run(
    matrix: _Matrix, gradient: Tensor, divisor: Tensor, kept: Tensor, sizes: Tensor, betas: tuple[float, float]
) -> bool:
    """Update one matrix by its gradient; return whether torch's compiler traced the update."""
    master, exp_avg, exp_avg_sq = (_lines(slot) for slot in matrix[:3])
    rounded = None if matrix.rounded is None else _lines(matrix.rounded)
    return _compiler()(rounded, master, exp_avg, exp_avg_sq, _lines(gradient.contiguous()), divisor, kept, sizes, betas)


def _lines(tensor: Tensor) -> Tensor:
    """Return a view of the contiguous `tensor` as [N / LINE, LINE], or as [N, 1] if LINE does not divide N.

    Code is compiled for any number of lines of this length. So the compiler knows the divisor, and a thread reads up to
    16 bytes at a time. Of plain open sizes torch 2.11 knows none, and a thread reads single numbers, which with one of
    the two block sizes between which the compiler chooses takes 2.4 times as long (moments in bfloat16, H100).
    """
    lines = tensor.view(-1, LINE if tensor.numel() % LINE == 0 else 1)
    torch._dynamo.maybe_mark_dynamic(lines, 0)
    torch._dynamo.mark_static(lines, 1)
    return lines


@cache
def _compiler() -> Callable[..., bool]:
    compiled: Callable[..., bool] = torch.compile(_update, fullgraph=True)
    return compiled


def _update(  # noqa: PLR0913, PLR0917 - one call for each matrix, whose tensors are arguments of the compiled code
    rounded: Tensor | None,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    divisor: Tensor,
    kept: Tensor,
    sizes: Tensor,
    betas: tuple[float, float],
) -> bool:
    """Update one matrix in place by its gradient, all in lines; return whether torch's compiler traced this function.

    Numbers that change are tensors, because a function is compiled for each number: the `divisor` of the gradient, the
    share of the weights that decay leaves (`kept`), and in `sizes` the learning rate without the bias of the first
    moment, and the factor that takes the bias from the root of the second one.
    """
    beta1, beta2 = betas
    clipped = gradient.float() / divisor
    first = exp_avg.float() * beta1 + clipped * (1 - beta1)
    second = exp_avg_sq.float() * beta2 + clipped * clipped * (1 - beta2)
    moved = master * kept - sizes[0] * first / (second.sqrt() * sizes[1] + EPS)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    master.copy_(moved)
    if rounded is not None:
        rounded.copy_(moved)
    return torch.compiler.is_compiling()
