"""The seam to XLA: device, step boundary, compile counters, graphs, and calls of JAX kernels. Importing it is free.

Beside the files `kernels/*/xla*` this is the only place that imports torch_xla, jax or libtpu, and always inside of
functions: the project's own environment has none of them. Which device is meant says the environment variable
PJRT_DEVICE (CPU or TPU), read when the first tensor is made.

torch_xla records operations and runs them when a value is needed or at a step's boundary. What is recorded in a step
is one graph; an equal graph, tensors' values apart, is not compiled again.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.errors import KernelUnsupported
from kernels.xla_compiler import libtpu_refusal

AXIS = "devices"
"""Name of the mesh's one axis."""


def use_mesh(devices: int) -> None:
    """Spread what this process computes over `devices` devices; to be called once, before its first tensor.

    Raises KernelUnsupported where the lane cannot run, or the machine has another number of devices.
    """
    assert_versions()
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


DISTRIBUTIONS = ("torch", "torch_xla", "jax", "jaxlib", "torchax", "libtpu")
PINNED = {"torch": "2.9.", "torch_xla": "2.9.", "jax": "0.7.1", "jaxlib": "0.7.1", "torchax": "0.0.13"}
"""Begin of the version that the lane was written for."""
COMPILER = "torch_xla"
"""Module whose import means that XLA may compile in this process."""


class Compiles(NamedTuple):
    """What this process compiled so far."""

    compile: int
    """Compilations."""
    uncached: int
    """Graphs that were run and had not been compiled before."""
    cached: int
    """Graphs that were run and had been compiled before."""
    seconds: float
    """Wall seconds of the compilations."""


def versions() -> dict[str, str]:
    """Return the installed version of every package of the lane that is there; torch's without its build tag."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return found


def version_refusal() -> str | None:
    """Return why the installed versions cannot run the lane, or None when they can."""
    here = versions()
    absent = [name for name in DISTRIBUTIONS if name not in here]
    if absent:
        return f"lane 'xla' needs {', '.join(absent)}, not installed here; `make tpu` makes its environment"
    for name, begin in PINNED.items():
        if not here[name].startswith(begin):
            return f"lane 'xla' needs {name} {begin.rstrip('.')}; installed is {here[name]} (requirements/tpu.lock)"
    return libtpu_refusal(here["libtpu"])


def assert_versions() -> None:
    """Raise KernelUnsupported, with the reason, unless the installed versions can run the lane."""
    refusal = version_refusal()
    if refusal is not None:
        raise KernelUnsupported(refusal)


def is_installed() -> bool:
    """Tell whether torch_xla is there at all; its versions may still be refused."""
    return find_spec("torch_xla") is not None


def describe() -> str:
    """Return versions and device in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions().items()) + f"; device {device()}"


@cache
def device() -> torch.device:
    """Return the XLA device of this process. Raises KernelUnsupported where the lane cannot run."""
    assert_versions()
    if os.environ.get("PJRT_DEVICE") not in ("CPU", "TPU"):
        given = os.environ.get("PJRT_DEVICE", "not set")
        raise KernelUnsupported(f"PJRT_DEVICE is {given}; allowed: CPU, TPU")
    import torch_xla

    found: torch.device = torch_xla.device()
    return found


def step_boundary() -> None:
    """Run everything recorded so far as one graph and wait for it."""
    import torch_xla

    torch_xla.sync(wait=True)


def compile_counts() -> Compiles:
    """Return what this process compiled so far; zeros while it compiled nothing."""
    from torch_xla.debug import metrics

    timed = metrics.metric_data("CompileTime")
    uncached, cached = (metrics.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile"))
    count, nanoseconds = timed[:2] if timed else (0, 0)
    return Compiles(compile=count, uncached=uncached, cached=cached, seconds=nanoseconds / 1e9)


def peak_bytes() -> int | None:
    """Return the most bytes in use on the device so far; None where its runtime does not tell, as a CPU's."""
    from torch_xla.core import xla_model

    try:
        told: dict[str, int] = xla_model.get_memory_info(device())
    except RuntimeError:  # "GetAllocatorStats is not supported"
        return None
    return told.get("peak_bytes_used")


def fallback_operations() -> list[str]:
    """Return the operations that XLA has no lowering for and that therefore ended a graph."""
    from torch_xla.debug import metrics

    found: list[str] = metrics.executed_fallback_ops()
    return found


def graph_hash(tensors: Sequence[Tensor]) -> str:
    """Return the hash of the graph that would make `tensors`, in hexadecimal; nothing is run."""
    digest: bytes = _xlac()._get_graph_hash(list(tensors))
    return digest.hex()


def hlo_proto(tensors: Sequence[Tensor]) -> bytes:
    """Return the graph that would make `tensors` as a serialized HloModuleProto; nothing is run."""
    proto: bytes = _xlac()._get_xla_tensors_hlo_proto(list(tensors))
    return proto


def hlo_text(tensors: Sequence[Tensor]) -> str:
    """Return the graph that would make `tensors` as text; nothing is run."""
    text: str = _xlac()._get_xla_tensors_hlo(list(tensors))
    return text


def forget_pending() -> None:
    """Drop everything recorded and not run."""
    _xlac()._clear_pending_irs(str(device()))


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory, for graphs that are compiled and never run.

    Where several devices share a step it holds zeros: what has no memory cannot be laid out on them.
    """
    from torch_xla import runtime
    from torch_xla.core import xla_builder

    if runtime.is_spmd():
        return torch.zeros(tuple(shape), dtype=dtype).to(device())
    device()
    made: Tensor = xla_builder.create_placeholder_tensor(tuple(shape), dtype)
    return made


def barrier(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of `tensors` that the compiler takes for new values: what is made from them is made again."""
    from torch_xla.core import xla_model

    copies = [tensor.detach().clone() for tensor in tensors]
    xla_model.optimization_barrier_(copies)
    return copies


def loop(body: Callable[..., Any], init: Any, xs: Any, partition: Callable[..., Any]) -> Any:
    """Run the pure `body(carry, x) -> (carry, y)` over the first axis of `xs` as one loop of the graph.

    Returns (last carry, ys stacked). `partition` divides the joint graph of a trip into forward and backward.
    """
    from torch_xla.experimental.scan import scan

    return scan(body, init, xs, partition_fn=partition, is_fn_pure=True)


def _xlac() -> Any:
    import torch_xla

    return torch_xla._XLAC
