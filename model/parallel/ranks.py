"""The ranks of one training step: processes of torch.distributed, one for each device.

`MeshConfig` divides a step in three ways at once: `data` ranks compute different rows of the batch, `context` ranks
different pieces of each row, `tensor` ranks different heads and columns of each layer. Rank
(d * context + c) * tensor + t has the coordinates (d, c, t). Of the ranks with equal t, each `expert` consecutive ones
share the experts.

Kernels exchange tensors over NCCL on GPUs and gloo on processors. Control messages (`agree`, `gather`) always use gloo,
so they wait for no device.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ablate.model.config import MeshConfig

PATIENCE = timedelta(minutes=30)
"""How long a collective waits for a rank. The worker ends a trial whose rank died, so nobody waits that long."""


@dataclass(frozen=True)
class Group:
    """The ranks that differ in one coordinate, as seen by this process."""

    process_group: dist.ProcessGroup
    index: int
    """This process's coordinate."""
    size: int

    def part(self, tensor: Tensor, axis: int) -> Tensor:
        """Return this process's contiguous share of `tensor` along `axis`, whose length `size` divides."""
        length = tensor.shape[axis]
        if length % self.size:
            raise ValueError(f"axis {axis} has {length} elements; allowed: a multiple of {self.size}")
        return tensor.narrow(axis, self.index * (length // self.size), length // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up `tensor` over the group in place, without gradients, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the contiguous `tensor` of every rank [size,...], without gradients."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(gathered), tensor, group=self.process_group)
        return gathered

    def exchange(self, rows: Tensor, given: list[int], taken: list[int]) -> Tensor:
        """Give consecutive `rows` to the ranks in order, and return those taken from them in order, without gradients.

        `given` and `taken` are the numbers of rows for and from each rank.
        """
        result = rows.new_empty((sum(taken), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), taken, given, group=self.process_group)
        return result


def summed_gradient(x: Tensor, group: Group) -> Tensor:
    """Return `x`, equal on all ranks. Its gradient is the sum of the ranks' partial gradients."""
    result: Tensor = _SummedGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def summed(partial_x: Tensor, group: Group) -> Tensor:
    """Return the sum of `partial_x` over the ranks. The gradient of the sum, equal on all, is that of every part."""
    result: Tensor = _Summed.apply(partial_x, group)  # type: ignore[no-untyped-call]
    return result


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_of_copies(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, partial_x: Tensor, group: Group) -> Tensor:
        return _sum_of_copies(partial_x, group)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _sum_of_copies(x: Tensor, group: Group) -> Tensor:
    return group.sum(x.clone(memory_format=torch.contiguous_format))


class Ranks:
    """This process among the ranks of a step. All ranks have to call each collective method, in one order."""

    def __init__(self, config: MeshConfig, device: torch.device) -> None:
        """Make the groups of `config`. The default process group exists already (`join`)."""
        self.config, self.device = config, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.world != config.devices:
            raise ValueError(f"{self.world} processes joined; the step has {config.devices} devices")
        shape = (config.data, config.context, config.tensor)
        self.mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "context", "tensor"))
        self.data, self.context, self.tensor = (_group_of(self.mesh[name]) for name in ("data", "context", "tensor"))
        self.rows_mesh: DeviceMesh = self.mesh["data", "context"]._flatten("rows")
        """Ranks that have the same parameters and different tokens: their gradients are added up."""
        self.rows = _group_of(self.rows_mesh)
        shape = (config.copies // config.expert, config.expert, config.tensor)
        by_experts = init_device_mesh(device.type, shape, mesh_dim_names=("expert_copies", "expert", "tensor"))
        self.expert, self.expert_copies = (_group_of(by_experts[name]) for name in ("expert", "expert_copies"))
        """Ranks of `rows` that share the experts, and those that have the same experts."""
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)

    def agree(self, *values: float) -> tuple[float, ...]:
        """Return the largest of each value of all ranks, so that all decide alike."""
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._control)
        return tuple(largest.tolist())

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, by rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._control)
        return values


def join(rank: int, world: int, meeting: Path, device: torch.device) -> None:
    """Join the default process group as `rank` of `world`. All ranks of one machine name one new file `meeting`."""
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    store = dist.FileStore(str(meeting), world)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)


def _group_of(mesh: DeviceMesh) -> Group:
    return Group(mesh.get_group(), mesh.get_local_rank(), mesh.size())
