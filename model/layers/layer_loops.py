"""Groups of blocks that repeat as one loop of the graph (lane xla), traced once for any number of trips.

`ablate.model.config.layer_runs` divides the pattern. A trip runs one group, such as MF in MFMFMF. The number of blocks
in loops and the loops' trips are recorded. In a loop `remat` applies to all blocks of a group that has a mixer, because
one partition cuts the whole trip into forward and backward.

Legend: B batch, S sequence, D d_model, L trips of a run.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.scan_switches import ScanFact
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla.partition import Partition
from ablate.model.config import HybridConfig, LayerRun, layer_runs
from ablate.model.facts import ModelFact


class LayerLoops:
    """Runs the blocks of a model. It is not a module, because it owns no parameters."""

    def __init__(self, blocks: nn.ModuleList, config: HybridConfig) -> None:
        self._runs = [_Run(list(blocks), run, config) for run in layer_runs(config)]

    def __call__(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """Return the residual stream after the last block. Raises KernelUnsupported on other devices than XLA."""
        if x_BSD.device.type != "xla":
            raise KernelUnsupported(f"scan_layers runs on XLA devices; the model is on {x_BSD.device.type}")
        loops = [run for run in self._runs if run.in_loop]
        facts.record(ModelFact.LAYERS_IN_LOOPS, sum(len(run.blocks) for run in loops))
        facts.record(ModelFact.LAYER_TRIPS, sum(run.trips for run in loops))
        for run in self._runs:
            x_BSD = run(x_BSD, segment_ids_BS)
        return x_BSD


class _Run:
    """Adjacent blocks: several trips of one group, or a single block."""

    def __init__(self, blocks: list[nn.Module], run: LayerRun, config: HybridConfig) -> None:
        self.blocks = blocks[run.start : run.start + run.num_blocks]
        self.trips = run.trips
        self.in_loop = run.trips > 1
        self._group = self.blocks[: len(run.group)]
        """Blocks of the first trip."""
        self._has_mixer = "M" in run.group
        self._remat = self._has_mixer and config.scan.remat
        self._bodies: dict[bool, tuple[Callable[..., Any], Partition]] = {}
        """Whether gradients are needed -> body of one trip. The same object every time, so that it is traced once."""

    def __call__(self, x_BSD: Tensor, segment_ids_BS: Tensor) -> Tensor:
        if not self.in_loop:
            for block in self.blocks:
                x_BSD = _sum(block(x_BSD, None, segment_ids_BS))
            return x_BSD
        with_gradients = torch.is_grad_enabled()
        if with_gradients not in self._bodies:
            self._bodies[with_gradients] = self._body()
        body, partition = self._bodies[with_gradients]
        stacked = [self._stacked(place) for place in range(len(self._group))]
        ids_LBS = segment_ids_BS.expand(self.trips, *segment_ids_BS.shape)
        x_BSD, _ = xla_device.loop(body, x_BSD, (stacked, ids_LBS), partition)
        if self._has_mixer and with_gradients:
            facts.record(ScanFact.REMAT, partition.recomputed > 0)
        return x_BSD

    def _stacked(self, place: int) -> dict[str, Tensor]:
        """Return the parameters of the blocks at `place` in their groups, stacked by trip."""
        blocks = self.blocks[place :: len(self._group)]
        names = [name for name, _ in blocks[0].named_parameters()]
        return {name: torch.stack([block.get_parameter(name) for block in blocks]) for name in names}

    def _body(self) -> tuple[Callable[..., Any], Partition]:
        def trip(x_BSD: Tensor, inputs: tuple[list[dict[str, Tensor]], Tensor]) -> tuple[Tensor, None]:
            of_blocks, segment_ids_BS = inputs
            for block, parameters in zip(self._group, of_blocks, strict=True):
                x_BSD = _sum(torch.func.functional_call(block, parameters, (x_BSD, None, segment_ids_BS)))
            return x_BSD, None

        return trip, Partition(remat=self._remat)


def _sum(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the residual stream after a block. A trip of a loop hands on one tensor."""
    x_BSD, update_BSD = outputs
    return x_BSD + update_BSD
