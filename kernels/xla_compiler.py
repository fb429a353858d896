"""Compile a lowered XLA module for a TPU that this machine does not have: libtpu, through jax's private interfaces.

Run as a program, one process for each compilation, because libtpu ends the process when something inside it fails:

    python -m kernels.xla_compiler ORDER.json ANSWER.json

The answer is one JSON object, written again whenever more of it is known: `versions`, `device_kind`, `graph`, then
`memory`, `collectives`, `compiled_calls` and `cost`, or `refusal` where the compiler raised an error, or `unusable`
where it cannot work.
jax is imported inside functions: the caller reads the answer without it.
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

from kernels import xla_graph

LIBRARY_PATH = "TPU_LIBRARY_PATH"
"""Environment variable, read by jax, that names the libtpu.so to load in place of the installed package's."""
BESIDE = Path("compiler", "libtpu", "libtpu.so")
"""Where `make tpu` puts a newer libtpu for compiling alone, below the environment's folder."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so compilations need not wait for each other
    # what torch_xla asks of libtpu where it finds chips, so that both compile alike
    "LIBTPU_INIT_ARGS": "--xla_tpu_use_enhanced_launch_barrier=false --xla_latency_hiding_scheduler_rerun=1 "
    "--xla_tpu_prefer_async_allgather_to_allreduce=true --xla_tpu_enable_flash_attention=false",
}
"""What the program is started with: no device is looked for, and no metadata server is asked."""

HBM_BYTES = {"TPU v6 lite": 32 * 2**30}
"""Main memory of one chip by libtpu's name of it; a program gets a little less."""

OLDEST_LIBTPU = (0, 0, 22)
"""Older ones cannot read the kernels that jax 0.7.1 writes (Mosaic version 8)."""
OLDEST_WITH_COSTS = (0, 0, 42)
"""libtpu 0.0.21 to 0.0.24 abort the process when they are asked for costs."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to compile."""

    topology: str
    """Chips by libtpu's name, for example "v6e:2x2"."""
    module: str | None = None
    """File with a serialized HloModuleProto; None only looks whether the topology can be compiled for."""
    partitions: int = 1
    """Chips that one step is spread over."""
    donate: bool = True
    """Whether the step overwrites its float32 inputs: parameters and optimiser state."""


def library() -> Path | None:
    """Return the libtpu.so to compile with: the operator's, or the one beside; None for the installed package's."""
    named, beside = os.environ.get(LIBRARY_PATH), Path(sys.prefix) / BESIDE
    if named and not _is_installed(Path(named)):
        return Path(named)
    return beside if beside.is_file() else None


def _is_installed(path: Path) -> bool:
    """Tell whether `path` is the installed package's: jax names that one when it is imported, not the operator."""
    package = find_spec("libtpu")
    origin = None if package is None else package.origin
    return origin is not None and path.resolve().parent == Path(origin).resolve().parent


def libtpu_version() -> str | None:
    """Return the version of the libtpu to compile with, None where there is none."""
    path = library()
    if path is None:
        return _version("libtpu")
    folder = [str(path.resolve().parent.parent)]
    found = next(iter(metadata.distributions(name="libtpu", path=folder)), None)
    return None if found is None else found.version


def refusal() -> str | None:
    """Return why nothing can be compiled here, or None when it can."""
    if _version("jax") is None:
        return "the package jax is not installed; `make tpu` makes an environment that has it"
    return libtpu_refusal(libtpu_version())


def libtpu_refusal(version: str | None) -> str | None:
    """Return why libtpu `version` cannot be used, or None when it can."""
    if version is None:
        where = library()
        return f"no libtpu around {where}" if where else "the package libtpu is not installed"
    if release(version) < OLDEST_LIBTPU:
        oldest = ".".join(map(str, OLDEST_LIBTPU))
        return f"libtpu is {version}; allowed: {oldest} or newer, older ones cannot read kernels of Mosaic version 8"
    return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for example (0, 0, 42, 1)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def main() -> None:
    """Compile as the order file says."""
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
    """The answer file: rewritten whole whenever something is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}

    def add(self, **known: Any) -> None:
        self._known |= known
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._known), encoding="utf-8")
        part.replace(self._path)


def _versions() -> dict[str, str]:
    known = {name: _version(name) for name in ("jax", "jaxlib", "torch", "torch_xla")} | {"libtpu": libtpu_version()}
    return {name: version for name, version in known.items() if version is not None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices(topology: str) -> Any:
    """Return the chips of a topology; libtpu describes a single one only when told that a host has no more."""
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
        build.allow_spmd_sharding_propagation_to_output = [True]  # as torch_xla's own client does
    return options


@contextmanager
def _stablehlo(module: bytes, *, donate: bool) -> Iterator[Any]:
    """Yield the module as StableHLO, its float32 inputs marked as donated: they are overwritten by the step."""
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
    """Return bytes of HBM on one chip, as the compiler laid them out."""
    stats = executable.get_compiled_memory_stats()
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
    }


def _program(executable: Any) -> Mapping[str, Any]:
    """Count collectives and kernels of the compiled program; nothing where jax cannot print what libtpu made."""
    try:
        text = "\n".join(part.to_string() for part in executable.hlo_modules())
    except RuntimeError:
        return {}
    return {"collectives": xla_graph.count_collectives(text), "compiled_calls": xla_graph.count_kernel_calls(text)}


def _cost(executable: Any) -> Mapping[str, float]:
    """Return the compiler's own counts for one chip. It counts a loop's body once, and of kernels what they declare."""
    told = executable.cost_analysis()
    first = told[0] if isinstance(told, list) else told
    named = {"flops": "flops", "bytes_accessed": "bytes accessed"}
    return {name: first[word] for name, word in named.items() if word in first}  # a count of nothing is left out


if __name__ == "__main__":
    main()
