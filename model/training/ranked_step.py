"""A step that several ranks compute together: rows, loss, gradients, and what all ranks have measured.

Every rank runs the same training loop on the same batches and computes its share of each. Decisions that depend on a
clock or a counter are agreed on (`agree`), or the ranks would wait for each other in different collectives.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ablate.kernels import facts
from ablate.kernels.facts import Fact
from ablate.model.config import TrainConfig
from ablate.model.data.packing import Batch
from ablate.model.facts import ModelFact
from ablate.model.hybrid import Hybrid
from ablate.model.layers.experts import experts_of
from ablate.model.parallel.context import row_piece, spread_rows
from ablate.model.parallel.data import ModelWithLoss, average_whole, local, sharding_of, share_parameters
from ablate.model.parallel.experts import average_experts, divide_experts
from ablate.model.parallel.ranks import Group, Ranks
from ablate.model.parallel.tensor import divide_layers, gradient_norm
from ablate.model.training.compilation import Forward
from ablate.model.training.loss import cross_entropy
from ablate.model.training.mesh import OneDevice
from ablate.model.training.optim_step import apply_update, to_device
from ablate.model.training.optimizers import AnyOptimizer
from ablate.model.training.profiled import communication_of

Value = TypeVar("Value")

ADDED = frozenset({ModelFact.ROWS})
"""Facts that add up over the ranks with different rows."""
EPSILON = 1e-6
"""Added to the gradient norm before the division, as torch's clipping does."""


class RankedStep(OneDevice):
    """The share of this rank."""

    def __init__(self, config: TrainConfig, model: Hybrid, ranks: Ranks) -> None:
        """Divide the whole `model`, which is on the processor, over `ranks`."""
        self.config, self.model, self.device, self.ranks = config, model, ranks.device, ranks
        self.is_first, self.world = ranks.rank == 0, ranks.world
        whole = _sizes(model)
        self.num_parameters = sum(whole.values())
        for layer in experts_of(model):
            layer.rows = ranks.rows
        self._slices = divide_layers(model, ranks)
        self._exchange = spread_rows(model, ranks)
        self._divided_by = max(whole[name] // size for name, size in _sizes(model).items() if name in whole)
        self._expert_elements = [layer.maps.num_elements for layer in experts_of(model)]
        self.experts = divide_experts(model, ranks)
        """Matrices of experts of which other ranks keep other ones, by name."""
        self._own = frozenset(self.experts.values())
        exact = config.loss == "chunked"  # it adds up the gradient of the weight in the weight's dtype
        self._root = share_parameters(ModelWithLoss(model, self._own_loss), ranks, exact_head=exact, own=self._own)
        self._shares = {parameter: nn.Parameter(local(parameter.detach())) for parameter in self.parameters}
        """What this rank stores of each parameter, as a plain tensor in the same memory."""
        divides = config.mesh.copies > 1 and config.mesh.sharding != "replicated"
        self._whole = [p for p in self.parameters if divides and p not in self._own and not isinstance(p, DTensor)]

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return this rank's part of the mean loss over the valid tokens of the whole `batch`, a float32 scalar."""
        own = row_piece(cut(batch, self.ranks.data), self.ranks.context)
        facts.record(ModelFact.CONTEXT, batch.tokens.shape[1] // own.tokens.shape[1])
        share = float(own.valid.sum()) / max(1.0, float(batch.valid.sum()))
        mean: Tensor = self._root(forward, *to_device(own, self.device))
        return mean * share

    def _own_loss(self, hidden: Tensor, head_weight: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        kind, chunk_tokens = self.config.loss, self.config.loss_chunk_tokens
        return cross_entropy(hidden, head_weight, targets, valid, kind, chunk_tokens, self.ranks.tensor)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the summed loss. The factor undoes the mean that `share_parameters` takes."""
        (loss * self.ranks.rows.size).backward()  # type: ignore[no-untyped-call]
        average_whole(self._whole, self.ranks)
        average_experts(self.experts.values(), self.ranks)

    def update(self, loss: Tensor, optimizer: AnyOptimizer) -> Tensor:
        """Update this rank's parameters; return [2] float32: whole loss and gradient norm before clipping."""
        self.backward(loss)
        norm = gradient_norm(self.model, (self._slices, self.ranks.tensor), (self.experts, self.ranks.expert))
        for parameter, share in self._shares.items():
            share.grad = None if parameter.grad is None else local(parameter.grad)
        self.model.zero_grad(set_to_none=True)
        gradients = [share.grad for share in self._shares.values() if share.grad is not None]
        torch._foreach_mul_(gradients, (self.config.optim.grad_clip / (norm + EPSILON)).clamp_max(1.0))
        apply_update(optimizer)
        return torch.stack((self.total(loss.detach().clone()), norm))

    def lay_out(self, optimizer: AnyOptimizer) -> None:
        """Let `optimizer` update this rank's shares as plain tensors: for DTensors the host needs longer than a GPU."""
        for group in optimizer.param_groups:
            group["params"] = [self._shares[parameter] for parameter in group["params"]]

    def finish(self) -> None:
        """Wait for the messages of this rank that are on their way."""
        self._exchange.finish()

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or of its state that this rank stores."""
        return local(tensor)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks with different tokens; changes it."""
        return self.ranks.rows.sum(value)

    def agree(self, *values: float) -> tuple[float, ...]:
        """Return the largest of each value of all ranks."""
        return self.ranks.agree(*values)

    def gather(self, value: Value) -> list[Value]:
        """Return the `value` of every rank."""
        return self.ranks.gather(value)

    def exchanges(self, step: Callable[[], None]) -> dict[str, Any]:
        """Return the measurements of the exchanges in one more step, the largest of any rank."""
        seconds, exposed_s, num_bytes = self.agree(*communication_of(step, self.device))
        return {
            "communication_s": seconds,
            "exposed_communication_s": exposed_s,
            "communication_bytes": int(num_bytes),
        }

    def record(self) -> None:
        """Record how the parameters lie on the ranks, and how many ranks there are."""
        if self.config.mesh.copies > 1:
            left_out = self._own | {layer.router for layer in experts_of(self.model)}  # routers are always whole
            for kind in sharding_of(p for p in self.parameters if p.ndim == 2 and p not in left_out):
                facts.record(ModelFact.SHARDING, kind)
        for layer, num_elements in zip(experts_of(self.model), self._expert_elements, strict=True):
            facts.record(ModelFact.EXPERT, num_elements // layer.maps.num_elements)
        facts.record(ModelFact.TENSOR, self._divided_by)
        facts.record(ModelFact.MESH_DEVICES, self.world)

    def join(self, observed: facts.Facts) -> None:
        """Combine the facts of all ranks: equal ones stay, rows add up, others become 'mixed'."""
        of_ranks = self.gather((self._counts_rows, dict(observed)))
        for name in dict.fromkeys(chain.from_iterable(values for _, values in of_ranks)):
            if name in ADDED:
                observed[name] = sum(int(values[name]) for counts, values in of_ranks if counts)
            else:
                observed[name] = _common([values.get(name) for _, values in of_ranks])

    @property
    def _counts_rows(self) -> bool:
        return self.ranks.context.index == 0 and self.ranks.tensor.index == 0


def _sizes(model: Hybrid) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}


def _common(values: list[Fact | None]) -> Fact:
    first = values[0]
    return first if first is not None and all(value == first for value in values) else "mixed"


def cut(batch: Batch, rows: Group) -> Batch:
    """Return this process's share of the rows. Rows without a valid token fill up a number that does not divide."""
    missing = -len(batch.tokens) % rows.size
    size = (len(batch.tokens) + missing) // rows.size
    if missing:
        batch = _each(batch, lambda part: np.concatenate((part, np.repeat(part[:1], missing, axis=0))))
        batch.valid[-missing:] = False
    return _each(batch, lambda part: part[rows.index * size : (rows.index + 1) * size])


def _each(batch: Batch, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Batch:
    return Batch(change(batch.tokens), change(batch.targets), change(batch.segment_ids), change(batch.valid))
