"""Ranks with equal parameters and different tokens: FSDP, HSDP, or whole copies of the parameters.

`fsdp` and `hsdp` divide each parameter, its gradient and its optimiser state (torch's `fully_shard`). The weights of a
block are gathered before the block computes, and again before its gradients. `replicated` keeps whole copies and adds
up the gradients while the backward pass runs (torch's DistributedDataParallel).

Weights of linear maps in bfloat16 are gathered in bfloat16: rounding before or after gathering gives the same numbers,
with half of the bytes. All other parameters are gathered, and all gradients added up, in float32.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from model.config import MeshConfig
from model.hybrid import Hybrid
from model.layers.linear import Linear
from model.parallel.ranks import Ranks

HSDP_COPIES = 2
"""Whole copies of the parameters with `hsdp`."""
GATHERED_BLOCKS = 2
"""Blocks whose weights in bfloat16 are gathered together."""


class ModelWithLoss(nn.Module):
    """A model and its loss under one root, so that the head is gathered when the loss reads it."""

    def __init__(self, model: Hybrid, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *inputs: object) -> Tensor:
        """Return loss(*inputs)."""
        return self._loss(*inputs)


def share_parameters(root: ModelWithLoss, ranks: Ranks) -> nn.Module:
    """Return the module that computes `root` with parameters and gradients shared by `ranks.rows`.

    Its gradients are the mean over these ranks. Parameters become DTensors in place, except with `replicated`.
    """
    config = ranks.config
    if config.copies == 1:
        return root.to(ranks.device)
    if config.sharding == "replicated":
        root.to(ranks.device)
        return DistributedDataParallel(root, process_group=ranks.rows.process_group, gradient_as_bucket_view=True)
    mesh = _mesh(config, ranks)
    _share_blocks(list(root.model.blocks), mesh)
    fully_shard(root, mesh=mesh)
    return root


def _share_blocks(blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Divide the large parameters of `blocks`. What remains, norms and numbers per head, is left to the root.

    The host needs about as long for a group of parameters as for a layer, so several blocks share one. A group is
    gathered while the one before computes.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    before: FSDPModule | None = None
    for first in range(0, len(blocks), GATHERED_BLOCKS):
        halves: list[nn.Module] = []
        for block in blocks[first : first + GATHERED_BLOCKS]:
            maps = _linear_maps(block)
            half = [one for one in maps if one.compute_dtype == torch.bfloat16 and one.products == "as_dtype"]
            halves += half
            if len(half) < len(maps):
                fully_shard(block, mesh=mesh, ignored_params={one.weight for one in half})
        if halves:
            fully_shard(halves, mesh=mesh, mp_policy=policy)
            if before is not None:
                before.set_modules_to_forward_prefetch([cast(FSDPModule, halves[0])])
            before = cast(FSDPModule, halves[0])


def _mesh(config: MeshConfig, ranks: Ranks) -> DeviceMesh:
    if config.sharding == "fsdp":
        return ranks.rows_mesh
    names = ("copies", "shares", "tensor")
    shape = (HSDP_COPIES, config.copies // HSDP_COPIES, config.tensor)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)["copies", "shares"]


def _linear_maps(block: nn.Module) -> list[Linear]:
    """Return the linear maps that lie in no other one."""
    maps = {name: module for name, module in block.named_modules() if isinstance(module, Linear)}
    return [one for name, one in maps.items() if not any(name.startswith(f"{other}.") for other in maps)]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's share of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharding_of(parameters: Iterable[Tensor]) -> Iterator[str]:
    """Yield how each parameter lies on the ranks, `fsdp`, `hsdp` or `replicated`, by the placements of its DTensor."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements):
            yield "hsdp" if parameter.device_mesh.ndim > 1 else "fsdp"
        else:
            yield "replicated"
