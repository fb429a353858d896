"""Calls of JAX functions and Pallas kernels from a torch_xla graph.

Both are lowered here and put into the recorded graph. The caller names the platform to lower for, whatever platform
JAX finds. So a machine without a TPU can trace and compile a graph that only a TPU can run.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ablate.kernels.xla import graph as xla_graph

Key: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of tensors."""


def call_jax(function: Callable[..., Any], tensors: Sequence[Tensor], *, platform: str = "tpu") -> list[Tensor]:
    """Return the leaves of the result of a pure JAX function. No gradient passes.

    Each function object is lowered once per shapes and dtypes, so pass the same object again. `platform` is "tpu" or
    "cpu", the machine that the graph is for.
    """
    leaves = _lowered(function, _key(tensors), platform)(list(tensors))
    return list(leaves) if isinstance(leaves, list | tuple) else [leaves]


def pallas_call(
    kernel: Callable[..., Any], tensors: Sequence[Tensor], outputs: Sequence[tuple[Sequence[int], torch.dtype]]
) -> list[Tensor]:
    """Put a Pallas kernel into the graph as a native custom call, which only a TPU can run. No gradient passes.

    `kernel` is a JAX function whose only operation is a pallas_call. `outputs` are the shapes and dtypes of its
    results.
    """
    import torch_xla

    payload = _payload(kernel, _key(tensors))
    shapes, dtypes = [list(shape) for shape, _ in outputs], [dtype for _, dtype in outputs]
    results: list[Tensor] = torch_xla._XLAC._xla_tpu_custom_call(list(tensors), payload, shapes, dtypes)
    return results


@lru_cache(maxsize=1)
def lower_kernels_for_tpu() -> None:
    """Make torch_xla lower its own Pallas kernels for a TPU on every machine. It asks JAX for the platform instead."""
    from torch_xla.experimental import custom_kernel

    custom_kernel.trace_pallas = _trace_pallas


def _trace_pallas(
    kernel: Callable[..., Any],
    *args: Any,
    static_argnums: Any = None,
    static_argnames: Any = None,
    use_cache: bool = False,
    **options: Any,
) -> tuple[str, list[Tensor]]:
    """Replace torch_xla's function of this name."""
    del use_cache
    import jax

    structs = [_structs(_key([arg]))[0] if isinstance(arg, Tensor) else arg for arg in args]
    traced = jax.jit(kernel, static_argnums=static_argnums, static_argnames=static_argnames).trace(*structs, **options)
    return _custom_call_payload(traced), [arg for arg in args if isinstance(arg, Tensor)]


@lru_cache(maxsize=256)
def _payload(kernel: Callable[..., Any], key: Key) -> str:
    import jax

    return _custom_call_payload(jax.jit(kernel).trace(*_structs(key)))


def _custom_call_payload(traced: Any) -> str:
    from torch_xla.experimental import custom_kernel

    module = traced.lower(lowering_platforms=("tpu",)).compiler_ir()
    payload = custom_kernel._extract_backend_config(module)
    if payload is None:
        raise RuntimeError(f"no {xla_graph.TPU_CALL} in the lowered kernel")
    return str(payload)


@lru_cache(maxsize=256)
def _lowered(function: Callable[..., Any], key: Key, platform: str) -> Callable[[list[Tensor]], Any]:
    import jax
    from torch_xla.core import xla_builder

    def flat(*arrays: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(function(*arrays)))

    traced = jax.jit(flat, keep_unused=True).trace(*_structs(key))
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo")
    computation = xla_builder.computation_from_module_proto("jax", module.as_serialized_hlo_module_proto())
    call: Callable[[list[Tensor]], Any] = xla_builder.xla_computation_as_func(computation, "jax")
    return call


def _key(tensors: Sequence[Tensor]) -> Key:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _structs(key: Key) -> list[Any]:
    import jax
    from torch_xla.experimental.custom_kernel import convert_torch_dtype_to_jax

    return [jax.ShapeDtypeStruct(shape, convert_torch_dtype_to_jax(dtype)) for shape, dtype in key]
