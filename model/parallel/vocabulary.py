"""The loss of a vocabulary that tensor ranks share: each has the logits of a contiguous range of tokens.

Legend: T tokens, V tokens of the vocabulary of this rank. Without a group this rank has all of them. The largest
messages are two numbers per token and rank: the log of the sum of the exponentials, and the target's logit.
"""

from typing import Any

import torch
from torch import Tensor

from ablate.model.parallel.ranks import Group


def norm_and_target(logits_TV: Tensor, targets_T: Tensor, group: Group | None) -> tuple[Tensor, Tensor]:
    """Return over the whole vocabulary the log of the summed exponentials and the logit of the target, [T,1] each."""
    norm_T1 = logits_TV.logsumexp(1, keepdim=True)
    if group is None:
        return norm_T1, logits_TV.gather(1, targets_T.unsqueeze(1))
    index_T1, is_here_T1 = _places(targets_T, logits_TV.shape[1], group)
    target_T1 = logits_TV.gather(1, index_T1).where(is_here_T1, 0)
    norms_KT1, targets_KT1 = group.gather(torch.stack((norm_T1, target_T1))).unbind(1)
    return norms_KT1.logsumexp(0), targets_KT1.sum(0)


def subtract_target(softmax_TV: Tensor, targets_T: Tensor, group: Group | None) -> Tensor:
    """Subtract 1 in place at each token's target, if this rank has it: the gradient of the token's loss."""
    index_T1, ones_T1 = targets_T.unsqueeze(1), torch.ones_like(softmax_TV[:, :1])
    if group is not None:
        index_T1, is_here_T1 = _places(targets_T, softmax_TV.shape[1], group)
        ones_T1 = is_here_T1.to(softmax_TV.dtype)
    return softmax_TV.scatter_add_(1, index_T1, -ones_T1)


def _places(targets_T: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return each target's place in this rank's range, 0 if it is elsewhere, and whether it is here, [T,1] each."""
    index_T1 = targets_T.unsqueeze(1) - group.index * size
    is_here_T1 = (index_T1 >= 0) & (index_T1 < size)
    return index_T1.where(is_here_T1, 0), is_here_T1


def token_losses(logits_TV: Tensor, targets_T: Tensor, group: Group) -> Tensor:
    """Return the cross entropy [T] of each token, from this rank's float32 logits. It saves the logits and [T,1]."""
    losses_T: Tensor = _TokenLosses.apply(logits_TV, targets_T, group)  # type: ignore[no-untyped-call]
    return losses_T


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, group: Group) -> Tensor:
        norm_T1, target_T1 = norm_and_target(logits_TV, targets_T, group)
        ctx.group = group
        ctx.save_for_backward(logits_TV, targets_T, norm_T1)
        return (norm_T1 - target_T1).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits_TV, targets_T, norm_T1 = ctx.saved_tensors
        grad_TV = subtract_target((logits_TV - norm_T1).exp_(), targets_T, ctx.group)
        return grad_TV.mul_(gradients[0].unsqueeze(1)), None, None
