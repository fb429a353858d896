"""Compile a lowered XLA module for an absent TPU, with libtpu through jax's private interfaces.

Each compilation is a process of its own, because libtpu ends the process when it fails:

    python -m ablate.kernels.xla.compiler ORDER.json ANSWER.json

The answer is one JSON object, rewritten as its parts become available: `versions`, `device_kind`, `graph`, then
`memory`, `collectives`, `compiled_calls` and `cost`. It holds `refusal` if the compiler raised an error, and `unusable`
if the compiler cannot work here. jax is imported inside functions, so the caller can read the answer without jax.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ablate.kernels.xla import graph as xla_graph

LIBRARY_PATH = "TPU_LIBRARY_PATH"
"""Environment variable with the libtpu.so that jax loads instead of the installed package's."""
BESIDE = Path("compiler", "libtpu", "libtpu.so")
"""Where `make tpu` puts a newer libtpu, only for compiling, below the environment's folder."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so compilations may run side by side
    # torch_xla's own arguments on a machine with chips, so that both compile alike
    "LIBTPU_INIT_ARGS": "--xla_tpu_use_enhanced_launch_barrier=false --xla_latency_hiding_scheduler_rerun=1 "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_flash_attention=false",
}
"""Environment of the program. It searches for no device and contacts no metadata server."""

HBM_BYTES = {"TPU v6 lite": 32 * 2**30}
"""libtpu's name of a chip -> its main memory. A program gets a little less."""

OLDEST_LIBTPU = (0, 0, 22)
"""Older releases cannot read the kernels that jax 0.7.1 writes (Mosaic version 8)."""
OLDEST_WITH_COSTS = (0, 0, 42)
"""libtpu 0.0.21 to 0.0.24 abort the process on a request for costs."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One compilation."""

    topology: str
    """Chips by libtpu's name, for example "v6e:2x2"."""
    module: str | None = None
    """File with a serialized HloModuleProto. None only checks the topology."""
    partitions: int = 1
    """Chips that one step is spread over."""
    donate: bool = True
    """Whether the step overwrites its float32 inputs: parameters and optimiser state."""


def library() -> Path | None:
    """Return the libtpu.so to compile with: the operator's or the newer one; None for the installed package's."""
    named, beside = os.environ.get(LIBRARY_PATH), Path(sys.prefix) / BESIDE
    if named and not _is_installed(Path(named)):
        return Path(named)
    return beside if beside.is_file() else None


def _is_installed(path: Path) -> bool:
    """Return whether `path` belongs to the installed package. jax sets the variable to it when it is imported."""
    package = find_spec("libtpu")
    origin = None if package is None else package.origin
    return origin is not None and path.resolve().parent == Path(origin).resolve().parent


def libtpu_version() -> str | None:
    """Return the version of the libtpu to compile with, or None without one."""
    path = library()
    if path is None:
        return _version("libtpu")
    folder = [str(path.resolve().parent.parent)]
    package = next(iter(metadata.distributions(name="libtpu", path=folder)), None)
    return None if package is None else package.version


def refusal() -> str | None:
    """Return why nothing can be compiled here, or None."""
    if _version("jax") is None:
        return "the package jax is not installed; `make tpu` makes an environment that has it"
    return libtpu_refusal(libtpu_version())


def libtpu_refusal(version: str | None) -> str | None:
    """Return why libtpu `version` cannot be used, or None."""
    if version is None:
        where = library()
        return f"no libtpu around {where}" if where else "the package libtpu is not installed"
    if release(version) < OLDEST_LIBTPU:
        oldest = ".".join(map(str, OLDEST_LIBTPU))
        return f"libtpu is {version}; allowed: {oldest} or newer, older ones cannot read kernels of Mosaic version 8"
    return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 0, 42, 1)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def main() -> None:
    """Compile the module of the order file."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    answer = _Answer(Path(sys.argv[2]))
    answer.add(versions=_versions(), topology=order.topology, partitions=order.partitions)
    unusable = refusal()
    if unusable is not None:
        answer.add(unusable=unusable)
        return
    devices = _devices(order.topology)
    answer.add(device_kind=devices[0].device_kind, chips=len(devices))
    if order.module is not None:
        _compile(order, Path(order.module).read_bytes(), devices, answer)


def _compile(order: Order, module: bytes, devices: Any, answer: "_Answer") -> None:
    answer.add(graph=asdict(xla_graph.read_graph(module)))
    start = time.perf_counter()
    try:
        executable = _executable(order, module, devices)
    except RuntimeError as error:
        answer.add(refusal=str(error), compile_s=time.perf_counter() - start)
        return
    answer.add(compile_s=time.perf_counter() - start, memory=_memory(executable))
    answer.add(**_program(executable))
    if release(libtpu_version() or "") >= OLDEST_WITH_COSTS:
        answer.add(cost=_cost(executable))


class _Answer:
    """The answer file, rewritten after each addition."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, Any] = {}

    def add(self, **entries: Any) -> None:
        self._entries |= entries
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._entries), encoding="utf-8")
        part.replace(self._path)


def _versions() -> dict[str, str]:
    versions = {name: _version(name) for name in ("jax", "jaxlib", "torch", "torch_xla")}
    versions["libtpu"] = libtpu_version()
    return {name: version for name, version in versions.items() if version is not None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices(topology: str) -> Any:
    """Return the chips of a topology. libtpu describes a single chip only if a host has no more."""
    from jax.experimental import topologies

    alone = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **alone).devices


def _executable(order: Order, module: bytes, devices: Any) -> Any:
    """Compile `module` for the first `order.partitions` of `devices`. Raises XlaRuntimeError, a RuntimeError."""
    from jax._src import compiler
    from jax._src.lib import xla_client

    used = tuple(devices[: order.partitions])
    options = _options(order.partitions)
    with _stablehlo(module, donate=order.donate) as parsed:
        return compiler.backend_compile_and_load(devices[0].client, parsed, xla_client.DeviceList(used), options, [])


def _options(partitions: int) -> Any:
    import numpy
    from jax._src import compiler

    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=partitions,
        device_assignment=numpy.arange(partitions).reshape(1, partitions),
        use_spmd_partitioning=partitions > 1,
    )
    build = options.executable_build_options
    build.use_shardy_partitioner = False
    if partitions > 1:
        build.allow_spmd_sharding_propagation_to_output = [True]  # like torch_xla's own client
    return options


@contextmanager
def _stablehlo(module: bytes, *, donate: bool) -> Iterator[Any]:
    """Yield the module as StableHLO. With `donate` its float32 inputs are marked as overwritten by the step."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(module))
    with mlir.make_ir_context():
        parsed = ir.Module.parse(text)
        if donate:
            _donate(parsed, ir)
        yield parsed


def _donate(parsed: Any, ir: Any) -> None:
    main = next(part for part in parsed.body.operations if ir.StringAttr(part.attributes["sym_name"]).value == "main")
    old = [dict(_pairs(part)) for part in main.arg_attrs] if "arg_attrs" in main.attributes else None
    marked = []
    for index, argument in enumerate(main.arguments):
        attributes = old[index] if old else {}
        if ir.RankedTensorType(argument.type).element_type == ir.F32Type.get():
            attributes = {**attributes, "jax.buffer_donor": ir.BoolAttr.get(True)}
        marked.append(ir.DictAttr.get(attributes))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(marked)


def _pairs(attributes: Any) -> Iterator[tuple[str, Any]]:
    return ((part.name, part.attr) for part in attributes)


def _memory(executable: Any) -> Mapping[str, int]:
    """Return the bytes of HBM on one chip in the compiler's layout."""
    stats = executable.get_compiled_memory_stats()
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
    }


def _program(executable: Any) -> Mapping[str, Any]:
    """Count collectives and kernels of the compiled program. Empty if jax cannot print libtpu's program."""
    try:
        text = "\n".join(part.to_string() for part in executable.hlo_modules())
    except RuntimeError:
        return {}
    return {"collectives": xla_graph.count_collectives(text), "compiled_calls": xla_graph.count_kernel_calls(text)}


def _cost(executable: Any) -> Mapping[str, float]:
    """Return the compiler's own counts for one chip. A loop's body counts once, a kernel as it declares itself."""
    analysis = executable.cost_analysis()
    first = analysis[0] if isinstance(analysis, list) else analysis
    names = {"flops": "flops", "bytes_accessed": "bytes accessed"}
    return {name: first[key] for name, key in names.items() if key in first}  # the compiler omits counts of 0


if __name__ == "__main__":
    main()
