"""One optimiser step: what a trial repeats, and what a compilation compiles. One place, so that both are the same."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import TrainConfig
from model.training import loss
from model.training.compilation import Forward


class DeviceBatch(NamedTuple):
    """One batch on the device; every tensor is [B,S]."""

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
    """Update the parameters by the gradients of `loss_now`; return it and the gradients' norm before clipping, [2]."""
    loss_now.backward()  # type: ignore[no-untyped-call]
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.optim.grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack((loss_now.detach(), grad_norm))
