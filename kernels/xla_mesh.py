"""Devices that share one step; part of the seam (kernels/xla_device.py).

The process sees one device and one program; how its tensors lie on the real ones is said here, and XLA's partitioner
(SPMD) divides the program and adds the collectives. Where PJRT_DEVICE is CPU the devices are virtual.
"""

import os
from functools import cache
from typing import Any

from torch import Tensor

from kernels import xla_device
from kernels.errors import KernelUnsupported

AXIS = "devices"
"""Name of the mesh's one axis."""


def use_mesh(devices: int) -> None:
    """Spread what this process computes over `devices` devices; to be called once, before its first tensor.

    Raises KernelUnsupported where the lane cannot run, or the machine has another number of devices.
    """
    xla_device.assert_versions()
    os.environ["CPU_NUM_DEVICES"] = str(devices)  # the runtime reads it when it is made, for PJRT_DEVICE=CPU alone
    from torch_xla import runtime

    runtime.use_spmd()
    found = num_devices()
    if found != devices:
        raise KernelUnsupported(f"the step is for {devices} devices; this process has {found}")


def num_devices() -> int:
    """Return the number of devices that this process computes on."""
    from torch_xla import runtime

    found: int = runtime.global_runtime_device_count()
    return found


def divide(tensor: Tensor, axis: int | None) -> None:
    """Divide `tensor` over the devices along `axis`; None puts the whole of it on each."""
    from torch_xla.distributed import spmd

    spmd.mark_sharding(tensor, _mesh(), _spec(tensor, axis))


def divide_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` divided along its first axis, and its gradient too."""
    from torch_xla.distributed import spmd

    divided: Tensor = spmd.mark_sharding_with_gradients(tensor, _mesh(), _spec(tensor, 0))
    return divided


def is_divided(tensor: Tensor) -> bool:
    """Tell whether `tensor` lies in parts on the devices, as the runtime knows it."""
    import torch_xla

    return "devices=" in torch_xla._XLAC._get_xla_sharding_spec(tensor)


def _spec(tensor: Tensor, axis: int | None) -> tuple[str | None, ...]:
    return tuple(AXIS if index == axis else None for index in range(tensor.dim()))


@cache
def _mesh() -> Any:
    import numpy
    from torch_xla.distributed import spmd

    return spmd.Mesh(numpy.arange(num_devices()), (num_devices(),), (AXIS,))
