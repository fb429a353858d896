"""The devices of a training step in one process: one device, or the mesh of lane xla. Ranks are in ranked_step.py.

On a mesh only the layout of the tensors is chosen here. The partitioner does the rest.

Every device takes an equal share of a batch's rows, and of the residual stream between blocks. With `fsdp` weight
matrices and their two moments are divided along the longest axis that the number of devices divides, and gathered
before use. Smaller tensors are whole on every device. With `replicated` all parameters are whole.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.xla import device as xla_device
from ablate.model.config import TrainConfig, check_mesh
from ablate.model.data.packing import Batch
from ablate.model.facts import ModelFact
from ablate.model.hybrid import Hybrid
from ablate.model.training.compilation import Forward
from ablate.model.training.optim_step import DeviceBatch, batch_loss, to_device, update
from ablate.model.training.optimizers import AnyOptimizer

Value = TypeVar("Value")


class OneDevice:
    """A step that this process computes alone. Every trial of ranks has the same methods (`RankedStep`)."""

    is_first = True
    """Whether this process reports for all."""
    world = 1
    """Number of processes."""

    def __init__(self, config: TrainConfig, model: Hybrid, device: torch.device) -> None:
        self.config, self.model, self.device = config, model.to(device), device
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        """Elements of the whole model."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, or this process's shares of them, that need gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _place(self, batch: Batch) -> DeviceBatch:
        """Return a batch of the host on the device."""
        return to_device(batch, self.device)

    def loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return this process's part of the mean loss over the valid tokens of `batch`, a float32 scalar."""
        return batch_loss(forward, self.model.lm_head.weight, self._place(batch), self.config)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss over all processes."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, loss: Tensor, optimizer: AnyOptimizer) -> Tensor:
        """Update the parameters; return [2] float32: the loss over all processes, the gradient norm before clipping."""
        return update(loss, self.parameters, optimizer, self.config)

    def finish(self) -> None:
        """Wait for messages to other processes that are on their way."""

    def stored(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or of its state that this process stores."""
        return tensor

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the processes that have different tokens."""
        return value

    def agree(self, *values: float) -> tuple[float, ...]:
        """Return the largest of each value of all processes."""
        return values

    def gather(self, value: Value) -> list[Value]:
        """Return the `value` of every process."""
        return [value]

    def lay_out(self, optimizer: AnyOptimizer) -> None:
        """Place parameters and state of `optimizer` on the devices, if that takes more than their own device."""

    def exchanges(self, _step: Callable[[], None]) -> dict[str, Any]:
        """Return the measurements of the exchanges between processes in one more step; none for one process."""
        return {}

    def record(self) -> None:
        """Record how the parameters lie on the devices, if there are several."""

    def join(self, observed: facts.Facts) -> None:
        """Combine the facts of all processes in `observed`."""


class XlaMesh(OneDevice):
    """The layout of one model's tensors on the devices of lane xla."""

    def lay_out(self, optimizer: AnyOptimizer) -> None:
        """Divide parameters and state. Raises ConfigError for gates, KernelUnsupported for an indivisible matrix."""
        check_mesh(self.config)
        for name, parameter in self.model.named_parameters():
            axis = self._axis(name, parameter)
            state = (value for value in optimizer.state[parameter].values() if value.shape == parameter.shape)
            for tensor in (parameter, *state):
                xla_device.divide(tensor, axis)
        for block in self.model.blocks:
            block.register_forward_hook(_divide_output)

    def _place(self, batch: Batch) -> DeviceBatch:
        """Return a batch of the host on the devices, its rows divided."""
        return divide_rows(super()._place(batch))

    def record(self) -> None:
        """Record the runtime's current layout of the weight matrices."""
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
        for is_divided in {xla_device.is_divided(parameter) for parameter in matrices}:
            facts.record(ModelFact.SHARDING, "fsdp" if is_divided else "replicated")
        facts.record(ModelFact.MESH_DEVICES, xla_device.num_devices())

    def _axis(self, name: str, parameter: nn.Parameter) -> int | None:
        mesh = self.config.mesh
        if mesh.sharding == "replicated" or parameter.dim() != 2:
            return None
        divisible = [axis for axis in (0, 1) if parameter.shape[axis] % mesh.devices == 0]
        if not divisible:
            raise KernelUnsupported(
                f"parameter '{name}' has the shape {list(parameter.shape)}, and {mesh.devices} devices divide "
                f"neither axis; allowed with sharding fsdp: matrices with an axis that is a multiple of it"
            )
        return max(divisible, key=lambda axis: parameter.shape[axis])


def divide_rows(batch: DeviceBatch) -> DeviceBatch:
    """Divide the rows of a batch over the devices of lane xla."""
    for tensor in batch:
        xla_device.divide(tensor, 0)
    return batch


def _divide_output(_block: nn.Module, _inputs: object, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(xla_device.divide_rows(output) for output in outputs)
