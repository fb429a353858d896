"""Adjacent blocks of one letter as one loop of the graph (lane xla), traced once for any number of blocks.

Blocks of different letters have different parameters, so a pattern is cut into runs of equal letters. Two kinds of runs
have no loop: single blocks, and attention by a TPU kernel, which cannot be in a traced loop. The number of blocks in
loops is recorded. Legend: B batch, S sequence, D d_model, L blocks of a run.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from kernels import facts, xla_device
from kernels.errors import KernelUnsupported
from kernels.scan_switches import ScanFact
from kernels.xla_partition import Partition
from model.config import HybridConfig
from model.facts import ModelFact


class LayerLoops:
    """Runs the blocks of a model. It is not a module, because it owns no parameters."""

    def __init__(self, blocks: nn.ModuleList, config: HybridConfig) -> None:
        self._runs = [_Run(list(blocks)[at], letter, config) for letter, at in _runs(config.pattern)]

    def __call__(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the residual stream after the last block. Raises KernelUnsupported on other devices than XLA."""
        if x_BSD.device.type != "xla":
            raise KernelUnsupported(f"scan_layers runs on XLA devices; the model is on {x_BSD.device.type}")
        facts.record(ModelFact.LAYERS_IN_LOOPS, sum(len(run.blocks) for run in self._runs if run.in_loop))
        for run in self._runs:
            x_BSD = run(x_BSD, segment_ids_BS)
        return x_BSD


class _Run:
    """Adjacent blocks of one letter."""

    def __init__(self, blocks: list[nn.Module], letter: str, config: HybridConfig) -> None:
        self.blocks = blocks
        self.in_loop = len(blocks) > 1 and (letter != "A" or config.attention.backend == "sdpa")
        self._is_mixer = letter == "M"
        self._remat = self._is_mixer and config.scan.remat
        self._bodies: dict[bool, tuple[Callable[..., Any], Partition]] = {}
        """Whether gradients are needed -> body of one trip. The same object every time, so that it is traced once."""

    def __call__(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        if not self.in_loop:
            for block in self.blocks:
                x_BSD = block(x_BSD, segment_ids_BS)
            return x_BSD
        with_gradients = torch.is_grad_enabled()
        if with_gradients not in self._bodies:
            self._bodies[with_gradients] = self._body()
        body, partition = self._bodies[with_gradients]
        names = [name for name, _ in self.blocks[0].named_parameters()]
        stacked = {name: torch.stack([block.get_parameter(name) for block in self.blocks]) for name in names}
        ids_LBS = segment_ids_BS.expand(len(self.blocks), *segment_ids_BS.shape)
        x_BSD, _ = xla_device.loop(body, x_BSD, (stacked, ids_LBS), partition)
        if self._is_mixer and with_gradients:
            facts.record(ScanFact.REMAT, partition.recomputed > 0)
        return x_BSD

    def _body(self) -> tuple[Callable[..., Any], Partition]:
        block = self.blocks[0]

        def trip(x_BSD: Tensor, inputs: tuple[dict[str, Tensor], Tensor]) -> tuple[Tensor, None]:
            parameters, segment_ids_BS = inputs
            return torch.func.functional_call(block, parameters, (x_BSD, segment_ids_BS)), None

        return trip, Partition(remat=self._remat)


def _runs(pattern: str) -> list[tuple[str, slice]]:
    """Return the runs of equal letters with their slices of the pattern."""
    runs, start = [], 0
    for letter, group in groupby(pattern):
        length = len(list(group))
        runs.append((letter, slice(start, start + length)))
        start += length
    return runs
