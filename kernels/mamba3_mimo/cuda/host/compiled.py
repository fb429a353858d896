"""Compile and cache the kernels of one shape and variant for sm_90a."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import Any, Literal, TypeAlias

import tilelang
from tilelang import PassConfigKey

from kernels import facts
from kernels.mamba3_mimo.cuda.backward import gradients, gradients_split, local_gradients, reductions
from kernels.mamba3_mimo.cuda.forward import outputs, prefix
from kernels.mamba3_mimo.cuda.host.shape import ScanShape
from kernels.mamba3_mimo.cuda.host.variant import Variant
from kernels.scan import ScanFact

Direction: TypeAlias = Literal["forward", "backward"]

TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""Named, not probed: the same cache key on a machine without a GPU."""

KERNELS: dict[str, Callable[[ScanShape, Variant, int], Any]] = {
    "angle_sums": lambda s, v, n: prefix.angle_sums(s),
    "tables": lambda s, v, n: prefix.tables(s),
    "decays": lambda s, v, n: prefix.decays(s, num_tokens=n, parallel=v.schedule == "chunk_parallel"),
    "local_states": lambda s, v, n: outputs.local_states(s, v),
    "pass_states": lambda s, v, n: outputs.pass_states(s, reverse=False),
    "outputs": lambda s, v, n: outputs.outputs(s, v),
    "local_gradients": lambda s, v, n: local_gradients.local_gradients(s, v),
    "pass_gradients": lambda s, v, n: outputs.pass_states(s, reverse=True),
    "gradients": lambda s, v, n: _walk(v)(s, v),
    "reduce_heads": lambda s, v, n: reductions.reduce_heads(s),
    "sum_weights": lambda s, v, n: reductions.sum_weights(s),
    "sum_biases": lambda s, v, n: reductions.sum_biases(s),
    "time_gradients": lambda s, v, n: reductions.time_gradients(s, num_tokens=n),
}
"""Name -> builder of the TileLang program for (shape, variant, true sequence length)."""

KNOW_THE_LENGTH = ("decays", "time_gradients")
"""Kernels that depend on the true sequence length; the others only on the padded one."""

KNOW_THE_START = ("gradients", "time_gradients")
"""Kernels that depend on whether a state enters the rows; the others read it from buffers that they have anyway."""

_writing = Lock()
"""TileLang's builder is Python, so programs are written one at a time; its compiler and nvcc run beside each other."""


def _walk(variant: Variant) -> Callable[..., Any]:
    if variant.warp_specialize:
        return gradients_split.gradients
    return gradients.gradients


MERGED = ("gradients",)
"""Kernels that `aggressive_smem_merge` changes: only the walk has buffers that may lie on each other."""


def pass_configs(name: str, variant: Variant) -> dict[Any, Any]:
    """Return the compiler options of kernel `name`.

    Without the merge every shared buffer has memory of its own. The compiler would else reuse memory after a buffer's
    last use in the text, knowing neither that asynchronous copies and products still run, nor that the kernels which
    place their own barriers need one there; a loop hides that only while it has more than one turn.
    """
    merged = variant.aggressive_smem_merge and name in MERGED
    return {
        PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: not variant.warp_specialize,
        PassConfigKey.TL_ENABLE_FAST_MATH: variant.fast_math,
        PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: merged,
        PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: not merged,
    }


class Launches(dict[str, Callable[..., object]]):
    """The compiled kernels of one problem, name -> function that launches it, each looked up once.

    It takes torch tensors in the order of the kernel's program, outputs included, and launches on torch's current
    stream. To call the compiled kernel itself does the same, after 4 us of Python at every launch.
    """

    def __init__(self, shape: ScanShape, variant: Variant, num_tokens: int) -> None:
        super().__init__()
        self._problem = shape, variant, num_tokens

    def __missing__(self, name: str) -> Callable[..., object]:
        function = kernel(name, *self._problem).adapter.get_exportable_executable()["main"]
        self[name] = function
        return self[name]


@lru_cache(maxsize=256)
def launches(shape: ScanShape, variant: Variant, num_tokens: int) -> Launches:
    """Return what launches the kernels of one problem: to be asked for once a pass, not once a kernel."""
    return Launches(shape, variant, num_tokens)


def kernel(name: str, shape: ScanShape, variant: Variant, num_tokens: int) -> Any:
    """Return the compiled kernel `name`; it takes torch tensors in the order of its program, outputs included."""
    if shape.started and name not in KNOW_THE_START:
        shape = replace(shape, started=False)
    return _compiled(name, shape, variant, num_tokens if name in KNOW_THE_LENGTH else shape.S)


def needed(direction: Direction, shape: ScanShape, variant: Variant) -> tuple[str, ...]:
    """Return the kernels that one pass launches."""
    parallel, raw = variant.schedule == "chunk_parallel", not shape.cumulated
    launched = {
        "forward": {
            "angle_sums": raw, "tables": raw, "decays": True,
            "local_states": parallel, "pass_states": parallel, "outputs": True,
        },
        "backward": {
            "local_gradients": parallel, "pass_gradients": parallel, "gradients": True, "reduce_heads": True,
            "sum_weights": True, "sum_biases": True, "time_gradients": True,
        },
    }[direction]  # fmt: skip
    return tuple(name for name, does in launched.items() if does)


@lru_cache(maxsize=256)
def build(direction: Direction, shape: ScanShape, variant: Variant, num_tokens: int) -> None:
    """Make the kernels of one pass ready, those that no run has compiled yet side by side.

    Records how many were compiled now and how many TileLang had kept on disk.
    """
    names = needed(direction, shape, variant)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as pool:
        made = list(pool.map(lambda name: kernel(name, shape, variant, num_tokens), names))
    new = sum(one.artifact is not None for one in made)
    facts.add(ScanFact.KERNELS_COMPILED, new)
    facts.add(ScanFact.KERNELS_LOADED, len(made) - new)


@lru_cache(maxsize=256)
def _compiled(name: str, shape: ScanShape, variant: Variant, num_tokens: int) -> Any:
    with _writing:
        program = KERNELS[name](shape, variant, num_tokens)
    options = pass_configs(name, variant)
    return tilelang.compile(program, target=TARGET, execution_backend="tvm_ffi", pass_configs=options)


def kernels_made() -> int:
    """Return how many kernels this process has made ready so far, compiled or loaded from TileLang's cache."""
    return _compiled.cache_info().misses
