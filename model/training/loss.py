"""Cross entropy of the next token and its implementations.

Legend: T tokens, D d_model, V vocabulary. The matmuls run in the dtype of the hidden states, all later operations in
float32.

    dense            all logits at once, eager: torch stores them in the compute dtype and twice in float32
    compiled         the same mathematics, compiled by torch's compiler, which stores them once in the compute dtype
    chunked          the logits of `chunk_tokens` tokens at a time, and the finished gradients [T,D] and [V,D]. On XLA
                     it is one loop of the graph
    torch_linear_ce  torch's own fused linear cross entropy, in chunks of its choice (torch 2.12 or newer). It rounds
                     the loss of each token to the compute dtype; the gradients are not affected
    liger            Liger's fused linear cross entropy (package liger-kernel), in chunks; sums in float32
    quack            QuACK's cross entropy kernel (package quack-kernels) over all logits in the compute dtype

No implementation replaces another. One that cannot run raises KernelUnsupported with the reason. Without gradients all
except `dense` compute chunk by chunk, so a validation compiles nothing and needs no more memory than a step.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.xla import device as xla_device
from ablate.model.config import DIVISIBLE_LOSSES, LossKind
from ablate.model.errors import ConfigError
from ablate.model.facts import ModelFact
from ablate.model.parallel.ranks import Group, summed_gradient
from ablate.model.parallel.vocabulary import norm_and_target, subtract_target, token_losses


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    valid_mask: Tensor,
    kind: LossKind = "dense",
    chunk_tokens: int = 256,
    vocabulary: Group | None = None,
) -> Tensor:
    """Return the mean loss over the valid tokens, a float32 scalar; 0 without valid tokens.

    `hidden` [...,D], `weight` [V,D] float32, `targets` [...] int64 (any value if invalid), `valid_mask` [...] bool.
    With ranks that share the `vocabulary`, `weight` has this rank's V tokens, and all ranks return the whole loss.
    Records the facts `ModelFact.LOSS`, `ModelFact.LOSS_TRIPS` (XLA), `ModelFact.ROWS` and `ModelFact.HIDDEN_DTYPE`.
    Raises KernelUnsupported if the implementation cannot run here.
    """
    facts.record(ModelFact.ROWS, targets.shape[0])
    facts.record(ModelFact.HIDDEN_DTYPE, str(hidden.dtype).removeprefix("torch."))
    hidden_TD, valid_T = hidden.flatten(0, -2), valid_mask.flatten()
    targets_T = targets.flatten().where(valid_T, 0)
    if kind not in KINDS:
        raise ConfigError("loss", f"is {kind!r}; allowed: {', '.join(KINDS)}")
    if vocabulary is not None and vocabulary.size > 1:
        return _of_ranks(hidden_TD, weight, targets_T, valid_T, kind, chunk_tokens, vocabulary)
    if kind != "dense" and not torch.is_grad_enabled():
        return _chunked(hidden_TD, weight, targets_T, valid_T, chunk_tokens, with_gradient=False).loss
    return KINDS[kind](hidden_TD, weight, targets_T, valid_T, chunk_tokens)


def _of_ranks(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    valid_T: Tensor,
    kind: LossKind,
    chunk_tokens: int,
    group: Group,
) -> Tensor:
    if kind not in DIVISIBLE_LOSSES:
        allowed = ", ".join(DIVISIBLE_LOSSES)
        raise ConfigError("loss", f"is {kind!r}; allowed with a vocabulary on {group.size} devices: {allowed}")
    hidden_TD = summed_gradient(hidden_TD, group)
    if kind == "chunked" and torch.is_grad_enabled():
        return _chunked_with_gradients(hidden_TD, weight_VD, targets_T, valid_T, chunk_tokens, group)
    if kind == "chunked":
        return _chunked(hidden_TD, weight_VD, targets_T, valid_T, chunk_tokens, group, with_gradient=False).loss
    facts.record(ModelFact.LOSS, "dense")
    logits_TV = functional.linear(hidden_TD, weight_VD.to(hidden_TD.dtype)).float()
    return _mean(token_losses(logits_TV, targets_T, group), valid_T)


def _dense(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor, _chunk_tokens: int) -> Tensor:
    facts.record(ModelFact.LOSS, "dense")
    return _of_all_logits(hidden_TD, weight_VD, targets_T, valid_T)[0]


def _compiled(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor, _chunk_tokens: int) -> Tensor:
    loss, was_compiled = _compiler()(hidden_TD, weight_VD, targets_T, valid_T)
    facts.record(ModelFact.LOSS, "compiled" if was_compiled else "dense")
    return loss


@cache
def _compiler() -> Callable[..., tuple[Tensor, bool]]:
    compiled: Callable[..., tuple[Tensor, bool]] = torch.compile(_of_all_logits, dynamic=False)
    return compiled


def _of_all_logits(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor) -> tuple[Tensor, bool]:
    """Return the mean loss, and whether torch's compiler traced this function."""
    logits_TV = functional.linear(hidden_TD, weight_VD.to(hidden_TD.dtype)).float()
    losses_T = functional.cross_entropy(logits_TV, targets_T, reduction="none")
    return _mean(losses_T, valid_T), torch.compiler.is_compiling()


def _mean(losses_T: Tensor, valid_T: Tensor) -> Tensor:
    return losses_T.where(valid_T, 0).sum() / valid_T.sum().clamp_min(1)


def _chunked_with_gradients(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    valid_T: Tensor,
    chunk_tokens: int,
    group: Group | None = None,
) -> Tensor:
    loss: Tensor = _Chunked.apply(hidden_TD, weight_VD, targets_T, valid_T, chunk_tokens, group)  # type: ignore[no-untyped-call]
    return loss


IGNORED = -100
"""Target of invalid tokens for the functions of other packages."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _torch_linear_ce(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor, _chunk_tokens: int
) -> Tensor:
    if not hasattr(functional, "linear_cross_entropy"):
        raise KernelUnsupported(f"loss 'torch_linear_ce' needs torch 2.12 or newer; this is {torch.__version__}")
    losses_T: Tensor = functional.linear_cross_entropy(
        hidden_TD,
        weight_VD.to(hidden_TD.dtype),
        targets_T,
        reduction="none",  # torch rounds its sums and means to the dtype of the hidden states
        options=torch.nn.LinearCrossEntropyOptions(acc_policy="accurate"),
    )
    facts.record(ModelFact.LOSS, "torch_linear_ce")
    return _mean(losses_T.float(), valid_T)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _liger(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor, _chunk_tokens: int) -> Tensor:
    _need_gpu("liger", hidden_TD)
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise KernelUnsupported(f"loss 'liger' needs the package liger-kernel: {error}") from error
    summed: Tensor = liger_fused_linear_cross_entropy(
        hidden_TD,
        weight_VD.to(hidden_TD.dtype),
        targets_T.where(valid_T, IGNORED),
        ignore_index=IGNORED,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    facts.record(ModelFact.LOSS, "liger")
    return summed.float() / valid_T.sum().clamp_min(1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _quack(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor, _chunk_tokens: int) -> Tensor:
    _need_gpu("quack", hidden_TD)
    try:
        from quack.cross_entropy import cross_entropy as kernel
    except ImportError as error:
        raise KernelUnsupported(f"loss 'quack' needs the package quack-kernels: {error}") from error
    logits_TV = functional.linear(hidden_TD, weight_VD.to(hidden_TD.dtype))
    losses_T: Tensor = kernel(logits_TV, targets_T, reduction="none", inplace_backward=True)
    facts.record(ModelFact.LOSS, "quack")
    return _mean(losses_T.float(), valid_T)


def _need_gpu(kind: str, hidden_TD: Tensor) -> None:
    if not hidden_TD.is_cuda:
        device = hidden_TD.device.type
        raise KernelUnsupported(f"loss '{kind}' runs on an NVIDIA GPU; the hidden states are on {device}")


def _chunk(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    valid_C: Tensor,
    count: Tensor,
    group: Group | None = None,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of one chunk and the gradient of its logits, None without `with_gradient`.

    `count` is the number of valid tokens of all chunks.
    """
    logits_CV = functional.linear(hidden_CD, weight_VD).float()
    norm_C1, target_C1 = norm_and_target(logits_CV, targets_C, group)
    losses_C = (norm_C1 - target_C1).squeeze(1)
    total = losses_C.where(valid_C, 0).sum()
    if not with_gradient:
        return total, None
    grad_CV = subtract_target(logits_CV.sub_(norm_C1).exp_(), targets_C, group)
    return total, grad_CV.mul_(valid_C.unsqueeze(1)).div_(count).to(hidden_CD.dtype)


class _Sums(NamedTuple):
    """Mean loss, and its gradients unless none are needed."""

    loss: Tensor
    hidden_TD: Tensor | None
    weight_VD: Tensor | None


def _chunked(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    valid_T: Tensor,
    chunk_tokens: int,
    group: Group | None = None,
    *,
    with_gradient: bool,
) -> _Sums:
    """Return the mean loss and its gradients, chunk by chunk."""
    facts.record(ModelFact.LOSS, "chunked")
    if hidden_TD.device.type == "xla":
        return _in_loop(hidden_TD, weight_VD, targets_T, valid_T, chunk_tokens, with_gradient=with_gradient)
    count = valid_T.sum().clamp_min(1)
    cast_VD = weight_VD.to(hidden_TD.dtype)
    total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
    grad_TD, grad_VD = (torch.zeros_like(t) if with_gradient else None for t in (hidden_TD, weight_VD))
    for start in range(0, hidden_TD.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        hidden_CD = hidden_TD[rows]
        rest = (targets_T[rows], valid_T[rows], count, group)
        part, grad_CV = _chunk(hidden_CD, cast_VD, *rest, with_gradient=with_gradient)
        total += part
        if grad_CV is not None and grad_TD is not None and grad_VD is not None:
            grad_TD[rows] = grad_CV @ cast_VD
            grad_VD += grad_CV.mT @ hidden_CD
    return _Sums(total / count, grad_TD, grad_VD)


def _in_loop(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid_T: Tensor, chunk_tokens: int, *, with_gradient: bool
) -> _Sums:
    """Return the sums of `_chunked` by one loop of the graph. Invalid tokens fill the last chunk."""
    num_tokens = hidden_TD.shape[0]
    chunks = -(-num_tokens // chunk_tokens)
    missing = chunks * chunk_tokens - num_tokens
    hidden_KCD = functional.pad(hidden_TD, (0, 0, 0, missing)).view(chunks, chunk_tokens, -1)
    targets_KC, valid_KC = (
        functional.pad(t, (0, missing)).view(chunks, chunk_tokens) for t in (targets_T, valid_T.float())
    )
    count, cast_VD = valid_T.sum().clamp_min(1), weight_VD.to(hidden_TD.dtype)

    def trip(carry: tuple[Tensor, ...], x: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        (total, count, cast_VD, *grads_VD), (hidden_CD, targets_C, valid_C) = carry, x
        part, grad_CV = _chunk(hidden_CD, cast_VD, targets_C, valid_C > 0, count, with_gradient=with_gradient)
        if grad_CV is None:
            return (total + part, count, cast_VD), None
        return (total + part, count, cast_VD, grads_VD[0] + grad_CV.mT @ hidden_CD), grad_CV @ cast_VD

    facts.record(ModelFact.LOSS_TRIPS, chunks)
    init: tuple[Tensor, ...] = (torch.zeros((), dtype=torch.float32, device=hidden_TD.device), count, cast_VD)
    init = (*init, torch.zeros_like(weight_VD)) if with_gradient else init
    (total, _, _, *grads_VD), grad_KCD = xla_device.loop_without_gradients(
        trip, init, (hidden_KCD, targets_KC, valid_KC)
    )
    if not with_gradient:
        return _Sums(total / count, None, None)
    return _Sums(total / count, grad_KCD.flatten(0, 1)[:num_tokens], grads_VD[0])


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        valid_T: Tensor,
        chunk_tokens: int,
        group: Group | None,
    ) -> Tensor:
        sums = _chunked(hidden_TD, weight_VD, targets_T, valid_T, chunk_tokens, group, with_gradient=True)
        ctx.save_for_backward(sums.hidden_TD, sums.weight_VD)
        return sums.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD = ctx.saved_tensors
        return grad_loss * hidden_TD, grad_loss * weight_VD, None, None, None, None


KINDS: dict[LossKind, Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]] = {
    "dense": _dense,
    "compiled": _compiled,
    "chunked": _chunked_with_gradients,
    "torch_linear_ce": _torch_linear_ce,
    "liger": _liger,
    "quack": _quack,
}
"""Value of the gate -> implementation with gradients, from (hidden, weight, targets, valid, chunk_tokens)."""
