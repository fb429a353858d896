"""A whole training step as one CUDA graph: the host launches it once, instead of each of its thousand kernels.

The graph reads its batch from tensors that stay in place. Documents of every batch of the run fit into them: the number
of boundaries is the largest of any batch, and attention over documents takes a whole row for the longest one. The
learning rate is a tensor of the optimiser, which the step before a replay fills.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kernels.documents import documents, replace_documents
from kernels.errors import KernelUnsupported
from model.data.packing import Batch
from model.training.optim_step import DeviceBatch, to_device


class StepGraph:
    """The recorded step."""

    def __init__(self, step: Callable[[DeviceBatch], Tensor], batches: Iterable[Batch], device: torch.device) -> None:
        """Record `step` on the first batch without running it.

        `batches` are all batches of the run. Raises KernelUnsupported if something in the step waits for the GPU.
        """
        first, room = None, 0
        for batch in batches:
            first = first or batch
            room = max(room, len(documents(torch.from_numpy(batch.segment_ids)).offsets) - 1)
        if first is None:
            raise ValueError("a step cannot be recorded without a batch")
        self._batch = to_device(first, device, room=room)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        try:
            with torch.cuda.graph(self._graph):
                self._outcome = step(self._batch)
        except RuntimeError as error:
            raise KernelUnsupported(f"the step cannot be recorded as a CUDA graph: {error}") from error
        self.replays = 0

    def run(self, batch: Batch) -> Tensor:
        """Run the step on `batch`; return its outcome, which the next replay overwrites."""
        for name, part in batch._asdict().items():
            if name != "segment_ids":
                getattr(self._batch, name).copy_(torch.from_numpy(part))
        replace_documents(self._batch.segment_ids, torch.from_numpy(batch.segment_ids))
        self._graph.replay()
        self.replays += 1
        return self._outcome
