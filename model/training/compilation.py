"""The compilation before step 0 (seconds, graphs, cache hits), and counters of later compilations.

torch.compile traces the whole model, or with ranks each kind of block once, so that exchanges run between blocks.

Three sources generate code: torch.compile, the scan's lanes cuda and peer, and flex attention. An eager trial should
not pay for the import of torch's compiler. So counters are read only from modules that something else has imported. A
module that is not imported has compiled nothing.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from ablate.kernels import facts, scan_switches
from ablate.kernels.backends import Lane
from ablate.kernels.scan_switches import ScanFact
from ablate.kernels.xla import device as xla_device
from ablate.model.config import TrainConfig, uses_inductor
from ablate.model.facts import ModelFact
from ablate.model.hybrid import Hybrid, ResidualBlock

Forward = Callable[[Tensor, Tensor], Tensor]
"""(tokens [B,S], segment ids [B,S]) -> hidden states [B,S,D]."""


def _torch_compilations(dynamo: ModuleType) -> int:
    """Count attempts to capture a frame, and graphs that inductor compiled or loaded. A backward pass counts itself."""
    names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    frames: int = dynamo.counters["frames"]["total"]
    graphs: int = sum(dynamo.counters["inductor"][name] for name in names)
    return frames + graphs


def _scan_compilations(compiled: ModuleType) -> int:
    count: int = compiled.num_kernels()
    return count


def _xla_compilations(_: ModuleType) -> int:
    return xla_device.compilations()


_COUNTERS: Mapping[str, Callable[[ModuleType], int]] = {
    "torch._dynamo.utils": _torch_compilations,
    scan_switches.COMPILER: _scan_compilations,
    xla_device.COMPILER: _xla_compilations,
}
"""Module of a compiler -> function that counts its compilations in this process. Kernels of third parties (lane peer)
do not count."""


def compilations() -> int:
    """Return how many graphs and kernels this process has compiled or loaded from a cache on disk.

    Only the growth of the number is meaningful. It takes some microseconds.
    """
    return sum(count(sys.modules[name]) for name, count in _COUNTERS.items() if name in sys.modules)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Cost of the compilation."""

    seconds: float = 0.0
    """Wall seconds of the pass that compiled, including its execution; 0 without a compilation."""
    cache_hit: bool | None = None
    """Whether all code came from the compilers' caches on disk; None without a compilation, or for lane peer, which
    does not report it."""


def start_compilation(config: TrainConfig, model: Hybrid, *, by_block: bool) -> Forward:
    """Return the forward function of `model`, which compiles at its first call. Resets earlier compilations.

    With `by_block` the blocks are graphs of their own.
    """
    if uses_inductor(config):
        from torch._dynamo.utils import counters

        torch.compiler.reset()
        counters.clear()
    if not config.compile:
        return model
    if by_block:
        torch._dynamo.config.optimize_ddp = False  # it cuts blocks at buckets of gradients
        return partial(model, layer=torch.compile(ResidualBlock.layer, dynamic=False))
    forward: Forward = torch.compile(model, dynamic=False)
    return forward


def record_compilation(config: TrainConfig, seconds: float, of_pass: facts.Facts) -> Compilation:
    """Read the compilers' counters after the first pass, with its facts `of_pass`, and record them as facts.

    The fact `ModelFact.COMPILED_GRAPHS` is recorded only if the model was compiled.
    """
    hits, misses = int(of_pass.get(ScanFact.KERNELS_LOADED, 0)), int(of_pass.get(ScanFact.KERNELS_COMPILED, 0))
    for name in (ScanFact.KERNELS_COMPILED, ScanFact.KERNELS_LOADED):
        if name in of_pass:
            facts.add(name, int(of_pass[name]))
    if uses_inductor(config):
        from torch._dynamo.utils import counters

        hits += counters["inductor"]["fxgraph_cache_hit"]
        misses += counters["inductor"]["fxgraph_cache_miss"]
        if config.compile:
            facts.add(ModelFact.COMPILED_GRAPHS, counters["stats"]["unique_graphs"])
    is_reported = hits + misses > 0 and config.model.scan.lane is not Lane.PEER
    return Compilation(seconds=seconds, cache_hit=misses == 0 if is_reported else None)
