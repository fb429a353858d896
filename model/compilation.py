"""torch.compile, and what can be known about it: seconds, graphs, cache hits.

The compiler is imported only when it is used: a trial that runs eagerly should not pay for it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels import facts

Forward = Callable[[Tensor, Tensor], Tensor]
"""(tokens [B,S], segment ids [B,S]) -> hidden states [B,S,D]."""


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What compiling cost."""

    seconds: float = 0.0
    """Wall seconds of the pass that compiled, its one execution included; 0 when nothing was compiled."""
    cache_hit: bool | None = None
    """Whether the code of every graph came from the compiler's cache on disk; None when nothing was compiled."""


def start_compiled(model: nn.Module) -> Forward:
    """Return the compiled forward of `model`; counters start at zero and earlier compilations are forgotten."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    compiled: Forward = torch.compile(model, dynamic=False)
    return compiled


def record_compilation(seconds: float) -> Compilation:
    """Read the compiler's counters after the first pass and record the fact compile.graphs."""
    from torch._dynamo.utils import counters

    facts.add("compile.graphs", counters["stats"]["unique_graphs"])
    hits, misses = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    return Compilation(seconds=seconds, cache_hit=misses == 0 and hits > 0)
