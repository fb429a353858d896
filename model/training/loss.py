"""Cross entropy of the next token, over all logits at once or chunk by chunk.

Legend: T tokens, D d_model, V vocabulary. The matmuls run in the dtype of the hidden states, all later operations in
float32.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from kernels import facts
from model.errors import ConfigError
from model.facts import ModelFact


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, valid_mask: Tensor, kind: str = "dense", chunk_tokens: int = 256
) -> Tensor:
    """Return the mean loss over the valid tokens, a float32 scalar; 0 without valid tokens.

    `hidden` [...,D], `weight` [V,D] float32, `targets` [...] int64 (any value if invalid), `valid_mask` [...] bool.
    `kind` "dense" saves all logits for the backward pass. "chunked" has the logits of `chunk_tokens` tokens at a time
    and saves the finished gradients [T,D] and [V,D] instead. Records the facts `ModelFact.LOSS`, `ModelFact.ROWS` and
    `ModelFact.HIDDEN_DTYPE`.
    """
    facts.record(ModelFact.ROWS, targets.shape[0])
    facts.record(ModelFact.HIDDEN_DTYPE, str(hidden.dtype).removeprefix("torch."))
    hidden_TD, valid_T = hidden.flatten(0, -2), valid_mask.flatten()
    targets_T = targets.flatten().where(valid_T, 0)
    if kind == "dense":
        return _dense(hidden_TD, weight, targets_T, valid_T)
    if kind == "chunked":
        if torch.is_grad_enabled():
            loss: Tensor = _Chunked.apply(hidden_TD, weight, targets_T, valid_T, chunk_tokens)  # type: ignore[no-untyped-call]
            return loss
        return _chunked(hidden_TD, weight, targets_T, valid_T, chunk_tokens)
    raise ConfigError("loss", f"is {kind!r}; allowed: dense, chunked")


def _dense(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor) -> Tensor:
    facts.record(ModelFact.LOSS, "dense")
    logits_TV = functional.linear(hidden_TD, weight_VD.to(hidden_TD.dtype)).float()
    losses_T = functional.cross_entropy(logits_TV, targets_T, reduction="none")
    return losses_T.where(valid_T, 0).sum() / valid_T.sum().clamp_min(1)


class _Gradients:
    """Gradients of the chunked loss, filled by its forward pass."""

    def __init__(self, hidden_TD: Tensor, weight_VD: Tensor) -> None:
        self.hidden_TD = torch.zeros_like(hidden_TD)
        self.weight_VD = torch.zeros_like(weight_VD)

    def add(self, rows: slice, hidden_CD: Tensor, weight_VD: Tensor, grad_CV: Tensor) -> None:
        """Add the gradients of one chunk from the gradient of its logits."""
        grad_CV = grad_CV.to(hidden_CD.dtype)
        self.hidden_TD[rows] = grad_CV @ weight_VD
        self.weight_VD += grad_CV.mT @ hidden_CD


def _chunked(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    valid_T: Tensor,
    chunk_tokens: int,
    gradients: _Gradients | None = None,
) -> Tensor:
    """Return the mean loss. `gradients`, if present, receives its gradients."""
    facts.record(ModelFact.LOSS, "chunked")
    count = valid_T.sum().clamp_min(1)
    weight_VD = weight_VD.to(hidden_TD.dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
    for start in range(0, hidden_TD.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        hidden_CD, target_C1, valid_C = hidden_TD[rows], targets_T[rows].unsqueeze(1), valid_T[rows]
        logits_CV = functional.linear(hidden_CD, weight_VD).float()
        norm_C1 = logits_CV.logsumexp(1, keepdim=True)
        losses_C = (norm_C1 - logits_CV.gather(1, target_C1)).squeeze(1)
        total += losses_C.where(valid_C, 0).sum()
        if gradients is not None:
            grad_CV = logits_CV.sub_(norm_C1).exp_().scatter_add_(1, target_C1, -torch.ones_like(norm_C1))
            gradients.add(rows, hidden_CD, weight_VD, grad_CV.mul_(valid_C.unsqueeze(1)).div_(count))
    return total / count


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor, chunk_tokens: int
    ) -> Tensor:
        gradients = _Gradients(hidden_TD, weight_VD)
        loss = _chunked(hidden_TD, weight_VD, targets_T, valid_T, chunk_tokens, gradients)
        ctx.save_for_backward(gradients.hidden_TD, gradients.weight_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD = ctx.saved_tensors
        return grad_loss * hidden_TD, grad_loss * weight_VD, None, None, None
