"""Seam to XLA: device, mesh, step boundary, compile counter and graphs.

Only the files of this folder import torch_xla, jax or libtpu, and only inside functions, because the project's own
environment has none of them. The environment variable PJRT_DEVICE (CPU or TPU) chooses the device. The runtime reads
it when the process makes its first tensor.

torch_xla records operations and runs them when a value is needed or at the boundary of a step. The operations of one
step form one graph. An equal graph is not compiled again, whatever the tensors' values.

Devices that share one step: the process sees one device and one program. XLA's partitioner (SPMD) divides the program
over the real devices and adds the collectives. With PJRT_DEVICE=CPU the devices are virtual.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.xla.compiler import libtpu_refusal

DISTRIBUTIONS = ("torch", "torch_xla", "jax", "jaxlib", "torchax", "libtpu")
PINNED = {"torch": "2.9.", "torch_xla": "2.9.", "jax": "0.7.1", "jaxlib": "0.7.1", "torchax": "0.0.13"}
"""Prefixes of the versions that the lane was written for."""
COMPILER = "torch_xla"
"""Module whose import means that XLA may compile in this process."""
AXIS = "devices"
"""Name of the mesh's only axis."""


def versions() -> dict[str, str]:
    """Return the installed versions of the lane's packages, without torch's build tag."""
    installed = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return installed


def version_refusal() -> str | None:
    """Return why the installed versions cannot run the lane, or None if they can."""
    installed = versions()
    absent = [name for name in DISTRIBUTIONS if name not in installed]
    if absent:
        return f"lane 'xla' needs {', '.join(absent)}, not installed here; `make tpu` makes its environment"
    for name, prefix in PINNED.items():
        if not installed[name].startswith(prefix):
            return (
                f"lane 'xla' needs {name} {prefix.rstrip('.')}; installed is {installed[name]} (requirements/tpu.lock)"
            )
    return libtpu_refusal(installed["libtpu"])


def assert_versions() -> None:
    """Raise KernelUnsupported with the reason unless the installed versions can run the lane."""
    refusal = version_refusal()
    if refusal is not None:
        raise KernelUnsupported(refusal)


@cache
def device() -> torch.device:
    """Return the XLA device of this process. Raises KernelUnsupported if the lane cannot run."""
    assert_versions()
    if os.environ.get("PJRT_DEVICE") not in ("CPU", "TPU"):
        value = os.environ.get("PJRT_DEVICE", "not set")
        raise KernelUnsupported(f"PJRT_DEVICE is {value}; allowed: CPU, TPU")
    import torch_xla

    xla: torch.device = torch_xla.device()
    return xla


def use_mesh(devices: int) -> None:
    """Spread the computation of this process over `devices` devices. Call it once, before the first tensor.

    Raises KernelUnsupported if the lane cannot run or the machine has another number of devices.
    """
    assert_versions()
    os.environ["CPU_NUM_DEVICES"] = str(devices)  # read by the runtime at its start, only with PJRT_DEVICE=CPU
    from torch_xla import runtime

    runtime.use_spmd()
    present = num_devices()
    if present != devices:
        raise KernelUnsupported(f"the step is for {devices} devices; this process has {present}")


def num_devices() -> int:
    """Return the number of devices that this process computes on."""
    from torch_xla import runtime

    count: int = runtime.global_runtime_device_count()
    return count


def divide(tensor: Tensor, axis: int | None) -> None:
    """Divide `tensor` over the devices along `axis`. None puts a whole copy on each device."""
    from torch_xla.distributed import spmd

    spmd.mark_sharding(tensor, _mesh(), _partition_spec(tensor, axis))


def divide_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` divided along its first axis; its gradient is divided, too."""
    from torch_xla.distributed import spmd

    divided: Tensor = spmd.mark_sharding_with_gradients(tensor, _mesh(), _partition_spec(tensor, 0))
    return divided


def is_divided(tensor: Tensor) -> bool:
    """Return whether the runtime stores `tensor` in parts on the devices."""
    return "devices=" in _xlac()._get_xla_sharding_spec(tensor)


def _partition_spec(tensor: Tensor, axis: int | None) -> tuple[str | None, ...]:
    return tuple(AXIS if index == axis else None for index in range(tensor.dim()))


@cache
def _mesh() -> Any:
    import numpy
    from torch_xla.distributed import spmd

    return spmd.Mesh(numpy.arange(num_devices()), (num_devices(),), (AXIS,))


def step_boundary() -> None:
    """Run all recorded operations as one graph and wait for it. Merge the memory that the step freed on the host."""
    import torch_xla

    torch_xla.sync(wait=True)
    bytes(_MERGES_FREED_PIECES)


_MERGES_FREED_PIECES = 2048
"""Bytes of an allocation. In the C library glibc an allocation of 1,024 bytes or more first merges all small free
pieces of memory. A step frees thousands, so this takes 0.5 to 4 ms. It is work of the step. Without this allocation
the next large one would do it after the end of the step, in time that belongs to no step."""


def compilations() -> int:
    """Return the number of graphs that this process has compiled."""
    from torch_xla.debug import metrics

    timed = metrics.metric_data("CompileTime")
    return timed[0] if timed else 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Graphs and operations that ran; of this process, or of a part of it as the difference of two counts."""

    graphs: int
    """Executions of graphs, on one device or divided over several."""
    host_operations: Mapping[str, int]
    """Operation -> its runs on the host, as `aten::nonzero`, in place of a graph: XLA has no lowering for it, or
    Python read a value (`aten::_local_scalar_dense`). Each ends the graph before it."""

    def since(self, earlier: "Work") -> "Work":
        """Return the work after the count `earlier`."""
        grown = {name: count - earlier.host_operations.get(name, 0) for name, count in self.host_operations.items()}
        return Work(
            graphs=self.graphs - earlier.graphs,
            host_operations={name: count for name, count in grown.items() if count},
        )


def work() -> Work:
    """Return the graphs and host operations that this process has run."""
    from torch_xla.debug import metrics

    counted = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith(_WANTED)}
    return Work(
        graphs=sum(counted.get(name, 0) for name in _LOOKUPS),
        host_operations={name: count for name, count in counted.items() if name.startswith(_ON_HOST)},
    )


_LOOKUPS = ("CachedCompile", "UncachedCompile")
"""torch_xla's counters of graphs that were about to run and looked up in its cache. Its metrics of execution times grow
in another thread, sometimes after the graph's results have arrived."""
_ON_HOST = "aten::"
"""Start of the name of torch_xla's counter of an operation that ran on the host."""
_WANTED = (*_LOOKUPS, _ON_HOST)
"""Starts of the names of the counters that `work` reads. It lists the names at every call, because torch_xla makes a
counter when it counts for the first time."""


def peak_bytes() -> int | None:
    """Return the peak of device memory in bytes, or None if the runtime does not report it, as on a CPU."""
    from torch_xla.core import xla_model

    try:
        memory: dict[str, int] = xla_model.get_memory_info(device())
    except RuntimeError:  # "GetAllocatorStats is not supported"
        return None
    return memory.get("peak_bytes_used")


def hlo_proto(tensors: Sequence[Tensor]) -> bytes:
    """Return the graph that would compute `tensors` as a serialized HloModuleProto. Runs nothing."""
    proto: bytes = _xlac()._get_xla_tensors_hlo_proto(list(tensors))
    return proto


def hlo_text(tensors: Sequence[Tensor]) -> str:
    """Return the graph that would compute `tensors` as text. Runs nothing."""
    text: str = _xlac()._get_xla_tensors_hlo(list(tensors))
    return text


def forget_pending() -> None:
    """Drop all recorded operations that have not run."""
    _xlac()._clear_pending_irs(str(device()))


class OneGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that run on the host while a step is traced. On tensors without memory they end the process.

    Raises KernelUnsupported inside the `with` block.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` unless it would run on the host."""
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if any(type(tensor) in (Tensor, Parameter) and tensor.device.type == "xla" for tensor in tensors):
            target = (kwargs or {}).get("device")
            if not _has_lowering(func) or (target is not None and torch.device(target).type != "xla"):
                raise KernelUnsupported(f"operation {func} runs on the host, so the step would not be one graph")
        return func(*args, **(kwargs or {}))


_READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operations whose lowering reads a value on the host."""
_LOWERED = ("XLA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""Dispatch keys of operations that torch_xla lowers, or that consist of such operations."""


@cache
def _has_lowering(func: Any) -> bool:
    name = func._schema.name
    if not name.startswith(_ON_HOST):  # torch_xla's own
        return True
    overload = f"{name}.{func._schema.overload_name}".rstrip(".")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return name not in _READS and any(has_kernel(overload, key) for key in _LOWERED)


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory, for graphs that are compiled and never run.

    On a mesh the tensor holds zeros, because a tensor without memory cannot be divided over devices.
    """
    from torch_xla import runtime
    from torch_xla.core import xla_builder

    if runtime.is_spmd():
        return torch.zeros(tuple(shape), dtype=dtype).to(device())
    device()
    empty: Tensor = xla_builder.create_placeholder_tensor(tuple(shape), dtype)
    return empty


def barrier(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of `tensors` that the compiler treats as new values, so it recomputes what depends on them."""
    from torch_xla.core import xla_model

    copies = [tensor.detach().clone() for tensor in tensors]
    xla_model.optimization_barrier_(copies)
    return copies


def loop(body: Callable[..., Any], init: Any, xs: Any, partition: Callable[..., Any]) -> Any:
    """Run the pure `body(carry, x) -> (carry, y)` over the first axis of `xs` as one loop of the graph.

    Returns (last carry, stacked ys). `partition` cuts the joint graph of a trip into forward and backward.
    """
    from torch_xla.experimental.scan import scan

    return scan(body, init, xs, partition_fn=partition, is_fn_pure=True)


def loop_without_gradients(body: Callable[..., Any], init: Any, xs: Any) -> Any:
    """Run `body(carry, x) -> (carry, y)` over the first axis of `xs` as one loop of the graph, without a backward pass.

    Returns (last carry, stacked ys). No tensor may be of truth values: torch_xla 2.9 turns them into integers.
    """
    from torch_xla.experimental import scan

    with torch.no_grad():
        return scan._scan_impl_pytree(body, init, xs)


def _xlac() -> Any:
    import torch_xla

    return torch_xla._XLAC
