"""One optimiser step: learning rate, loss, gradients, clipping and update. Trials and compilations share this code."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ablate.kernels import facts
from ablate.kernels.documents import with_documents
from ablate.model.config import OptimConfig, TrainConfig
from ablate.model.data.packing import Batch
from ablate.model.facts import ModelFact
from ablate.model.training import loss
from ablate.model.training.compilation import Forward
from ablate.model.training.compiled_adamw import CompiledAdamW
from ablate.model.training.optimizers import AnyOptimizer, MuonAndAdamW


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return the rate of optimiser step `step`: a linear ramp over `warmup_steps`, then constant."""
    if step >= config.warmup_steps:
        return config.learning_rate
    return config.learning_rate * (step + 1) / config.warmup_steps


def set_learning_rate(optimizer: AnyOptimizer, rate: float) -> None:
    """Use `rate` in every group from the next step on. On a GPU a rate that is a tensor keeps its place in memory."""
    for group in optimizer.param_groups:
        old = group["lr"]
        if isinstance(old, torch.Tensor) and old.is_cuda:
            old.fill_(rate)
        else:
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


def to_device(batch: Batch, device: torch.device, *, room: int | None = None) -> DeviceBatch:
    """Copy a batch of the host to `device`; on a GPU with its document boundaries, see `with_documents` for `room`."""
    on_host = DeviceBatch(*(torch.from_numpy(part) for part in batch))
    if device.type != "cuda":
        return DeviceBatch(*(part.to(device) for part in on_host))
    tokens, targets, valid = (part.to(device) for part in (on_host.tokens, on_host.targets, on_host.valid))
    return DeviceBatch(tokens, targets, with_documents(on_host.segment_ids, device, room=room), valid)


def batch_loss(forward: Forward, head_weight: Tensor, batch: DeviceBatch, config: TrainConfig) -> Tensor:
    """Return the mean cross entropy over the valid tokens of `batch`, float32; see `loss.cross_entropy`."""
    hidden = forward(batch.tokens, batch.segment_ids)
    return loss.cross_entropy(hidden, head_weight, batch.targets, batch.valid, config.loss, config.loss_chunk_tokens)


def update(
    loss_now: Tensor, parameters: Sequence[nn.Parameter], optimizer: AnyOptimizer, config: TrainConfig
) -> Tensor:
    """Update the parameters by the gradients of `loss_now`; return [2]: loss, gradient norm before clipping.

    Records the facts `ModelFact.OPTIMIZER`, `ADAMW_UPDATE` and `ADAMW_MOMENTS`, except on XLA.
    """
    loss_now.backward()  # type: ignore[no-untyped-call]
    if config.optim.update in ("clip_in_update", "compiled"):
        grad_norm = _clip_in_update(parameters, optimizer, config.optim.grad_clip)
    else:
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.optim.grad_clip)
    apply_update(optimizer, recorded=loss_now.device.type != "xla")
    return torch.stack((loss_now.detach(), grad_norm))


def _clip_in_update(parameters: Sequence[nn.Parameter], optimizer: AnyOptimizer, limit: float) -> Tensor:
    """Return the gradient norm; the fused update divides the gradients by norm / limit where that is above 1.

    The divisor and the flag are the arguments through which torch's gradient scaler speaks to a fused optimiser.
    """
    grad_norm = _norm([p.grad for p in parameters if p.grad is not None])
    optimizer.grad_scale = (grad_norm / limit).clamp_min(1.0)  # type: ignore[union-attr]
    optimizer.found_inf = torch.zeros_like(grad_norm)  # type: ignore[union-attr]
    return grad_norm


def _norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients, added up in float32. One kernel takes many tensors of one dtype."""
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        group = [gradient for gradient in gradients if gradient.dtype == dtype]
        norms += torch._foreach_norm(group, 2, dtype=torch.float32)
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


def apply_update(optimizer: AnyOptimizer, *, recorded: bool = True) -> None:
    """Update the parameters by their gradients, record how unless it is not `recorded`, and drop the gradients."""
    optimizer.step()
    if recorded:
        _record(optimizer)
    optimizer.zero_grad(set_to_none=True)


def _record(optimizer: AnyOptimizer) -> None:
    """Record the algorithm and the implementation of the optimiser that stepped, not those of the configuration."""
    if not facts.collecting():
        return
    facts.record(ModelFact.OPTIMIZER, "muon" if isinstance(optimizer, MuonAndAdamW) else "adamw")
    own = optimizer.matrices if isinstance(optimizer, CompiledAdamW) else optimizer.state.values()
    for dtype in {slots["exp_avg"].dtype for slots in own if "exp_avg" in slots}:
        facts.record(ModelFact.ADAMW_MOMENTS, str(dtype).removeprefix("torch."))
    if isinstance(optimizer, CompiledAdamW):
        facts.record(ModelFact.ADAMW_UPDATE, "compiled" if optimizer.compiled else "not compiled")
        return
    adamw = optimizer.adamw if isinstance(optimizer, MuonAndAdamW) else optimizer
    options = adamw.param_groups[0]
    clips = getattr(adamw, "grad_scale", None) is not None
    fused = "clip_in_update" if clips else "fused"
    facts.record(ModelFact.ADAMW_UPDATE, fused if options["fused"] else "foreach" if options["foreach"] else "single")
