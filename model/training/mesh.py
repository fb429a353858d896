"""Layout of one training step's tensors on the devices of a mesh (lane xla). The partitioner does the rest.

Every device takes an equal share of a batch's rows, and of the residual stream between blocks. With `fsdp` weight
matrices and their two moments are divided along the longest axis that the number of devices divides, and gathered
before use. Smaller tensors are whole on every device. With `replicated` all parameters are whole.
"""

from torch import Tensor, nn

from kernels import facts, xla_device
from kernels.errors import KernelUnsupported
from model.config import TrainConfig, check_mesh
from model.facts import ModelFact
from model.hybrid import Hybrid
from model.training.optim_step import DeviceBatch
from model.training.optimizers import AnyOptimizer


class Mesh:
    """The layout of one model's tensors."""

    def __init__(self, config: TrainConfig, model: Hybrid, optimizer: AnyOptimizer) -> None:
        """Lay out parameters and state. Raises ConfigError for gates, KernelUnsupported for an indivisible matrix."""
        check_mesh(config)
        self._config = config.mesh
        self._matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        for name, parameter in model.named_parameters():
            axis = self._axis(name, parameter)
            state = (value for value in optimizer.state[parameter].values() if value.shape == parameter.shape)
            for tensor in (parameter, *state):
                xla_device.divide(tensor, axis)
        for block in model.blocks:
            block.register_forward_hook(_divide_output)

    def lay_out(self, batch: DeviceBatch) -> DeviceBatch:
        """Divide the rows of `batch`."""
        for tensor in batch:
            xla_device.divide(tensor, 0)
        return batch

    def record(self) -> None:
        """Record the runtime's current layout of the weight matrices."""
        for is_divided in {xla_device.is_divided(parameter) for parameter in self._matrices}:
            facts.record(ModelFact.SHARDING, "fsdp" if is_divided else "replicated")
        facts.record(ModelFact.MESH_DEVICES, xla_device.num_devices())

    def _axis(self, name: str, parameter: nn.Parameter) -> int | None:
        if self._config.sharding == "replicated" or parameter.dim() != 2:
            return None
        divisible = [axis for axis in (0, 1) if parameter.shape[axis] % self._config.devices == 0]
        if not divisible:
            raise KernelUnsupported(
                f"parameter '{name}' has the shape {list(parameter.shape)}, and {self._config.devices} devices divide "
                f"neither axis; allowed with sharding fsdp: matrices with an axis that is a multiple of it"
            )
        return max(divisible, key=lambda axis: parameter.shape[axis])


def _divide_output(_block: nn.Module, _inputs: object, x_BSD: Tensor) -> Tensor:
    return xla_device.divide_rows(x_BSD)
