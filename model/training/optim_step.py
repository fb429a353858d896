"""One optimiser step: AdamW, learning rate, loss and update. Trials and compilations share this code."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.config import OptimConfig, TrainConfig
from model.training import loss
from model.training.compilation import Forward


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: to matrices, not to vectors (norm weights, dt_bias, D) or biases."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def adamw(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.AdamW:
    """Return the optimiser, with weight decay for the parameters that `decays` selects."""
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if decays(name, p)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in trained if not decays(name, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    if any(parameter.device.type == "xla" for _, parameter in trained):
        return _compilable(groups, betas, config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def _compilable(groups: list[dict[str, Any]], betas: tuple[float, float], rate: float) -> torch.optim.AdamW:
    """Return AdamW whose steps are equal graphs from the first one on.

    Values that change from step to step are tensors, because a number would be compiled into the graph. The state that
    AdamW creates in its first step exists before it.
    """
    device = groups[0]["params"][0].device
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, capturable=True, foreach=False)
    for group in optimizer.param_groups:  # the constructor would read a tensor's value and so run a graph
        group["lr"] = torch.tensor(rate).to(device)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return the rate of optimiser step `step`: a linear ramp over `warmup_steps`, then constant."""
    if step >= config.warmup_steps:
        return config.learning_rate
    return config.learning_rate * (step + 1) / config.warmup_steps


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in every group from the next step on."""
    for group in optimizer.param_groups:
        old = group["lr"]
        group["lr"] = torch.tensor(rate).to(old.device) if isinstance(old, torch.Tensor) else rate


class DeviceBatch(NamedTuple):
    """One batch on the device. Every tensor is [B,S]."""

    tokens: Tensor
    """int64."""
    targets: Tensor
    """int64, valid or not."""
    segment_ids: Tensor
    """int64."""
    valid: Tensor
    """bool."""


def batch_loss(forward: Forward, head_weight: Tensor, batch: DeviceBatch, config: TrainConfig) -> Tensor:
    """Return the mean cross entropy over the valid tokens of `batch`, float32."""
    hidden = forward(batch.tokens, batch.segment_ids)
    return loss.cross_entropy(hidden, head_weight, batch.targets, batch.valid, config.loss, config.loss_chunk_tokens)


def update(
    loss_now: Tensor, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, config: TrainConfig
) -> Tensor:
    """Update the parameters by the gradients of `loss_now`; return [2]: loss, gradient norm before clipping."""
    loss_now.backward()  # type: ignore[no-untyped-call]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.optim.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack((loss_now.detach(), grad_norm))
