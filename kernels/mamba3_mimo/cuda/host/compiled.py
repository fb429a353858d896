"""Compile and cache the kernels of a shape and variant for sm_90a."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias

import tilelang
import tilelang.language as T  # noqa: N812  (the language's own name)
from tilelang import PassConfigKey

from ablate.kernels import facts
from ablate.kernels.mamba3_mimo.cuda.backward import gradients, local_gradients, reductions, time_gradients
from ablate.kernels.mamba3_mimo.cuda.forward import outputs, prefix
from ablate.kernels.mamba3_mimo.cuda.host import machine_code
from ablate.kernels.mamba3_mimo.cuda.shape import ScanShape, Variant
from ablate.kernels.scan_switches import ScanFact

Direction: TypeAlias = Literal["forward", "backward"]

TARGET = {"kind": "cuda", "arch": "sm_90a"}
"""Fixed, not probed, so that a machine without a GPU has the same cache key."""

KERNELS: dict[str, Callable[[ScanShape, Variant], Any]] = {
    "angle_sums": lambda s, v: prefix.angle_sums(s),
    "tables": lambda s, v: prefix.tables(s),
    "decays": lambda s, v: prefix.decays(s, v),
    "local_states": lambda s, v: outputs.local_states(s, v),
    "pass_states": lambda s, v: outputs.pass_states(s, reverse=False),
    "outputs": lambda s, v: outputs.outputs(s, v),
    "local_gradients": lambda s, v: local_gradients.local_gradients(s, v),
    "pass_gradients": lambda s, v: outputs.pass_states(s, reverse=True),
    "gradients": lambda s, v: gradients.gradients(s, v),
    "reduce_heads": lambda s, v: reductions.reduce_heads(s),
    "sum_weights": lambda s, v: reductions.sum_weights(s),
    "sum_heads": lambda s, v: reductions.sum_heads(s),
    "time_gradients": lambda s, v: time_gradients.time_gradients(s),
}
"""Name -> builder of the TileLang program for (shape, variant)."""

OF_WALKS = ("local_states", "outputs", "local_gradients", "gradients", "reduce_heads")
"""Kernels that see every super-chunk as a row."""
OF_ANY_SUPER_CHUNKS = ("angle_sums", "pass_states", "pass_gradients", "sum_weights", "sum_heads")
"""Kernels that do not depend on the length of a super-chunk."""

OF_SIZES = (
    *("angle_sums", "tables", "decays", "pass_states", "pass_gradients"),
    *("reduce_heads", "sum_weights", "sum_heads", "time_gradients"),
)
"""Kernels whose program no switch changes, except the schedule for the decays. `fast_math` is a compiler option."""

READS_START = ("gradients", "time_gradients")
"""Kernels whose program depends on whether a state enters the rows. The others have buffers for it anyway."""

_ready: dict[tuple[str, ScanShape, Variant], Any] = {}
"""Kernels that this process has compiled or loaded."""
_writing = Lock()
"""TileLang's builder is Python, so programs are built one at a time. Its compiler and nvcc run in parallel."""


def program(name: str, shape: ScanShape, variant: Variant) -> Any:
    """Return the TileLang program of kernel `name`, for every batch and length."""
    return KERNELS[name](_with_open_sizes(name, shape), variant)


def _with_open_sizes(name: str, s: ScanShape) -> ScanShape:
    """Return the sizes in the kernel's view, with variables for those that the launch sets."""
    if name in OF_WALKS:
        return _OpenWalks(**vars(s) | {"B": T.dynamic("walks"), "S": s.L, "open_sums": T.dynamic("sums")})
    super_chunks = T.dynamic("super_chunks")
    return _OpenRows(**vars(s) | {"B": T.dynamic("batch"), "S": super_chunks * s.L, "super_chunks": super_chunks})


@dataclass(frozen=True, kw_only=True)
class _OpenWalks(ScanShape):
    open_sums: Any

    @property
    def sums(self) -> Any:
        return self.open_sums


@dataclass(frozen=True, kw_only=True)
class _OpenRows(ScanShape):
    super_chunks: Any

    @property
    def K(self) -> Any:  # noqa: N802  (not S // L: the compiler would not see that it is one number)
        return self.super_chunks


def pass_configs(name: str, variant: Variant) -> dict[Any, Any]:
    """Return the compiler options of kernel `name`.

    Without the merge every shared buffer has memory of its own. Otherwise the compiler would reuse memory after a
    buffer's last use in the text. It does not know that asynchronous copies and products may still run, and that
    kernels with their own barriers would need another one there. A loop with more than one turn hides the fault.
    """
    variant = _relevant(name, variant)
    merged = variant.aggressive_smem_merge
    return {
        PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True,  # roles are written by hand
        PassConfigKey.TL_ENABLE_FAST_MATH: variant.fast_math,
        PassConfigKey.TL_ENABLE_AGGRESSIVE_SHARED_MEMORY_MERGE: merged,
        PassConfigKey.TL_DISABLE_SHARED_MEMORY_REUSE: not merged,
    }


class Launches(dict[str, Callable[..., object]]):
    """Kernel name -> function that launches it, for one problem. Each kernel is looked up once.

    The function takes torch tensors and numbers in the order of the kernel's program, outputs included, and launches on
    torch's current stream. Calling the compiled kernel itself would add 4 us of Python per launch.
    """

    def __init__(self, shape: ScanShape, variant: Variant) -> None:
        super().__init__()
        self._problem = shape, variant

    def __missing__(self, name: str) -> Callable[..., object]:
        function = kernel(name, *self._problem).adapter.get_exportable_executable()["main"]
        self[name] = function
        return self[name]


@lru_cache(maxsize=256)
def launches(shape: ScanShape, variant: Variant) -> Launches:
    """Return the launch functions of one problem. Call it once per pass, not per kernel."""
    return Launches(shape, variant)


def kernel(name: str, shape: ScanShape, variant: Variant) -> Any:
    """Return the compiled kernel `name`, the same for every batch and length. `Launches` lists its arguments."""
    key = for_any_size(name, shape, variant)
    if key not in _ready:
        _ready[key] = _compiled(*key)
    return _ready[key]


def for_any_size(name: str, shape: ScanShape, variant: Variant) -> tuple[str, ScanShape, Variant]:
    """Return the key of the compiled kernel: name, shape and variant without irrelevant sizes and switches."""
    length = shape.C if name in OF_ANY_SUPER_CHUNKS else shape.L
    started = shape.started and name in READS_START
    variant = replace(_relevant(name, variant), superchunk=0, remat=False, heads_in_turn=0)
    return name, replace(shape, B=0, S=0, L=length, started=started, in_turn=1), variant


def _relevant(name: str, variant: Variant) -> Variant:
    """Return the variant without switches that do not change kernel `name`.

    Only B3 can overlap buffers and use a warp group only for copies.
    """
    if name in OF_SIZES:
        schedule = variant.schedule if name == "decays" else Variant.schedule
        return Variant(schedule=schedule, fast_math=variant.fast_math)
    return variant if name == "gradients" else replace(variant, aggressive_smem_merge=False, warp_specialize=False)


def needed(direction: Direction, shape: ScanShape, variant: Variant) -> tuple[str, ...]:
    """Return the kernels that one pass launches."""
    parallel, raw = variant.schedule == "chunk_parallel", not shape.cumulated
    launched = {
        "forward": {
            "angle_sums": raw, "tables": raw, "decays": True,
            "local_states": parallel, "pass_states": parallel, "outputs": True,
        },
        "backward": {
            "outputs": variant.remat, "local_gradients": parallel, "pass_gradients": parallel, "gradients": True,
            "reduce_heads": True, "sum_weights": True, "sum_heads": True, "time_gradients": True,
        },
    }[direction]  # fmt: skip
    return tuple(name for name, does in launched.items() if does)


@lru_cache(maxsize=256)
def build(direction: Direction, shape: ScanShape, variant: Variant) -> None:
    """Compile or load the kernels of one pass that this process does not have yet, in parallel.

    Records how many were compiled and how many came from TileLang's cache on disk. Another batch or length adds none.
    """
    names = needed(direction, shape, variant)
    names = tuple(name for name in names if for_any_size(name, shape, variant) not in _ready)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "compile") as pool:
        added = list(pool.map(lambda name: kernel(name, shape, variant), names))
    new = sum(one.artifact is not None for one in added)
    facts.add(ScanFact.KERNELS_COMPILED, new)
    facts.add(ScanFact.KERNELS_LOADED, len(added) - new)


def _compiled(name: str, shape: ScanShape, variant: Variant) -> Any:
    with _writing:
        text = program(name, shape, variant)
    options = pass_configs(name, variant)
    made = tilelang.compile(text, target=TARGET, execution_backend="tvm_ffi", pass_configs=options)
    folder = getattr(made, "_tilelang_cache_path", None)
    if folder is not None:
        machine_code.check(name, Path(folder))
    return made


def num_kernels() -> int:
    """Return how many kernels this process has compiled or loaded from TileLang's cache."""
    return len(_ready)
