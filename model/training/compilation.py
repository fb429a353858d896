"""What is compiled before step 0, and what can be known about it: seconds, graphs, cache hits; and what came later.

Three things generate code: torch.compile, the scan's lanes cuda and peer, and flex attention. The compiler of torch is
imported only when it is used: a trial that runs eagerly should not pay for it. So counters of compilers are read from
modules that something else has imported; what is not imported has compiled nothing.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from kernels import facts, scan_switches, xla_device
from kernels.backends import Lane
from kernels.scan_switches import ScanFact
from model.config import TrainConfig, uses_inductor
from model.facts import ModelFact

Forward = Callable[[Tensor, Tensor], Tensor]
"""(tokens [B,S], segment ids [B,S]) -> hidden states [B,S,D]."""


def _torch_compilations(dynamo: ModuleType) -> int:
    """Count attempts to capture a frame, and graphs that inductor made ready: a backward pass is one of its own."""
    made = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    frames: int = dynamo.counters["frames"]["total"]
    graphs: int = sum(dynamo.counters["inductor"][name] for name in made)
    return frames + graphs


def _scan_compilations(compiled: ModuleType) -> int:
    made: int = compiled.num_kernels()
    return made


def _xla_compilations(_: ModuleType) -> int:
    return xla_device.compilations()


_COUNTERS: Mapping[str, Callable[[ModuleType], int]] = {
    "torch._dynamo.utils": _torch_compilations,
    scan_switches.COMPILER: _scan_compilations,
    xla_device.COMPILER: _xla_compilations,
}
"""How each compiler tells how often this process has compiled, by the module that knows. What third-party kernels
(lane peer) compile by themselves is not counted."""


def compilations() -> int:
    """Return how many graphs and kernels this process has made ready so far, compiled or loaded from a cache on disk.

    Only its growth means something; it costs some microseconds.
    """
    return sum(count(sys.modules[name]) for name, count in _COUNTERS.items() if name in sys.modules)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What compiling cost."""

    seconds: float = 0.0
    """Wall seconds of the pass that compiled, its one execution included; 0 when nothing was compiled."""
    cache_hit: bool | None = None
    """Whether all code came from the compilers' caches on disk; None when nothing was compiled, or it is not known:
    lane peer does not tell."""


def start_compilation(config: TrainConfig, model: nn.Module) -> Forward:
    """Return the forward of `model` to be used, compiled at its first call; earlier compilations are forgotten."""
    if uses_inductor(config):
        from torch._dynamo.utils import counters

        torch.compiler.reset()
        counters.clear()
    forward: Forward = torch.compile(model, dynamic=False) if config.compile else model
    return forward


def record_compilation(config: TrainConfig, seconds: float, seen: facts.Facts) -> Compilation:
    """Read the compilers' counters after the first pass, whose facts are `seen`; record those that say what was made.

    The fact `ModelFact.COMPILED_GRAPHS` is there only if the model was compiled.
    """
    hits, misses = int(seen.get(ScanFact.KERNELS_LOADED, 0)), int(seen.get(ScanFact.KERNELS_COMPILED, 0))
    for name in (ScanFact.KERNELS_COMPILED, ScanFact.KERNELS_LOADED):
        if name in seen:
            facts.add(name, int(seen[name]))
    if uses_inductor(config):
        from torch._dynamo.utils import counters

        hits += counters["inductor"]["fxgraph_cache_hit"]
        misses += counters["inductor"]["fxgraph_cache_miss"]
        if config.compile:
            facts.add(ModelFact.COMPILED_GRAPHS, counters["stats"]["unique_graphs"])
    told = hits + misses > 0 and config.model.scan.lane is not Lane.PEER
    return Compilation(seconds=seconds, cache_hit=misses == 0 if told else None)
