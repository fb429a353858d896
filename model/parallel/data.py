"""Ranks with equal parameters and different tokens: FSDP, HSDP, or whole copies of the parameters.

`fsdp` and `hsdp` divide the weights of linear maps, the embedding and the final norm, with their gradients and their
optimiser state (torch's `fully_shard`). The weights of a block are gathered before the block computes, and again before
its gradients. Hooks of the blocks do that, outside of what torch's compiler makes of a block. The other norms and the
numbers per head, under 1 % of a model, are whole on every rank: their gradients are added up in one message after the
backward pass. `replicated` keeps whole copies and adds up the gradients while the backward pass runs (torch's
DistributedDataParallel). Neither touches experts of which each rank keeps its own (experts.py).

Weights of linear maps in bfloat16 are gathered in bfloat16: rounding before or after gathering gives the same numbers,
with half of the bytes. All other parameters are gathered, and all gradients added up, in float32.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ablate.model.config import MeshConfig
from ablate.model.hybrid import Hybrid
from ablate.model.layers.linear import Linear
from ablate.model.parallel.ranks import Ranks

HSDP_COPIES = 2
"""Whole copies of the parameters with `hsdp`."""
GATHERED_BLOCKS = 4
"""Blocks whose weights are gathered together."""
BUCKET_MB = 200
"""Gradients of `replicated` that are added up together: NCCL moves smaller messages more slowly."""
_IN_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)

LossOfHidden = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From hidden states, weight of the head, targets and mask of valid tokens to the loss."""


class ModelWithLoss(nn.Module):
    """A model and its loss under one root, so that all parameters are gathered when they are read."""

    def __init__(self, model: Hybrid, loss: LossOfHidden) -> None:
        super().__init__()
        self.model = model
        self.head = HeadWithLoss(model.lm_head, loss)

    def forward(
        self, forward: Callable[..., Tensor], tokens: Tensor, targets: Tensor, segment_ids: Tensor, valid: Tensor
    ) -> Tensor:
        """Return the loss of a batch; `forward` computes the model's hidden states."""
        loss: Tensor = self.head(forward(tokens, segment_ids), targets, valid)
        return loss


class HeadWithLoss(nn.Module):
    """The head and the loss, which reads its weight."""

    def __init__(self, head: Linear, loss: LossOfHidden) -> None:
        super().__init__()
        self.linear = head
        self._loss = loss

    def forward(self, hidden: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        """Return the loss of the hidden states."""
        return self._loss(hidden, self.linear.weight, targets, valid)


def share_parameters(root: ModelWithLoss, ranks: Ranks, *, exact_head: bool, own: frozenset[nn.Parameter]) -> nn.Module:
    """Return the module that computes `root` with parameters and gradients shared by `ranks.rows`.

    With `exact_head` the loss gets the head's weight in float32 for any dtype of the model.
    Its gradients are the mean over these ranks, after `average_whole`, except those of its `own` parameters, which only
    move to the device. Divided parameters become DTensors in place.
    """
    config = ranks.config
    if config.copies == 1:
        return root.to(ranks.device)
    if config.sharding == "replicated":
        root.to(ranks.device)
        group = ranks.rows.process_group
        left_out = [name for name, parameter in root.named_parameters() if parameter in own]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, left_out)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(
            root,
            process_group=group,
            broadcast_buffers=False,  # ranks keep theirs equal (experts.py)
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MB,
        )
    mesh = _mesh(config, ranks)
    groups = [*_share_blocks(list(root.model.blocks), mesh, ranks, own), _share_head(root.head, mesh, exact=exact_head)]
    fully_shard(root, mesh=mesh, ignored_params={root.model.lm_head.weight})
    _gather_ahead([root, *groups])
    return root


def _share_blocks(
    blocks: list[nn.Module], mesh: DeviceMesh, ranks: Ranks, own: frozenset[nn.Parameter]
) -> list[nn.Module]:
    """Divide the linear maps of `blocks` except `own`. Return the first block of each group that is gathered together.

    The host needs about as long for a group, and for each of its parameters, as for a layer. So several blocks share
    one, and the rest of a block stays whole on every rank.
    """
    groups = [blocks[first : first + GATHERED_BLOCKS] for first in range(0, len(blocks), GATHERED_BLOCKS)]
    for group in groups:
        maps = [one for block in group for one in block.modules() if isinstance(one, Linear) and one.weight not in own]
        half = all(one.compute_dtype == torch.bfloat16 and one.products == "as_dtype" for one in maps)
        rest = {parameter for block in group for parameter in block.parameters()} - {one.weight for one in maps}
        policy = _IN_HALF if half else MixedPrecisionPolicy()
        fully_shard(group, mesh=mesh, mp_policy=policy, ignored_params=rest)
        for parameter in rest:
            parameter.data = parameter.data.to(ranks.device)
    return [group[0] for group in groups]


def _share_head(head: HeadWithLoss, mesh: DeviceMesh, *, exact: bool) -> HeadWithLoss:
    """Divide the weight of the head, which stays gathered until its gradient exists."""
    half = head.linear.compute_dtype == torch.bfloat16 and not exact
    policy = _IN_HALF if half else MixedPrecisionPolicy()
    fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return head


def _gather_ahead(groups: list[nn.Module]) -> None:
    """Let every group gather its parameters while the one before computes."""
    for group, following in pairwise(groups):
        cast(FSDPModule, group).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def _mesh(config: MeshConfig, ranks: Ranks) -> DeviceMesh:
    if config.sharding == "fsdp":
        return ranks.rows_mesh
    names = ("copies", "shares", "tensor")
    shape = (HSDP_COPIES, config.copies // HSDP_COPIES, config.tensor)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)["copies", "shares"]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def average_whole(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace the gradients of parameters that `fsdp` or `hsdp` leaves whole by their mean over `ranks.rows`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        summed = ranks.rows.sum(torch.cat([gradient.flatten() for gradient in gradients])) / ranks.rows.size
        parts = torch.split(summed, [gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(old) for part, old in zip(parts, gradients, strict=True)])


def sharding_of(parameters: Iterable[Tensor]) -> Iterator[str]:
    """Yield how each parameter lies on the ranks, `fsdp`, `hsdp` or `replicated`, by the placements of its DTensor."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements):
            yield "hsdp" if parameter.device_mesh.ndim > 1 else "fsdp"
        else:
            yield "replicated"
