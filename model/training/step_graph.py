"""A whole training step as one CUDA graph: the host launches it once, instead of each of its thousand kernels.

The graph reads its batch from tensors that stay in place. Documents of every batch of the run fit into them: the number
of boundaries is the largest of any batch, and attention over documents takes a whole row for the longest one. The host
prepares the next batch while the GPU computes. The learning rate is a tensor of the optimiser, which the step before a
replay fills.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ablate.kernels.documents import documents, replace_documents
from ablate.kernels.errors import KernelUnsupported
from ablate.model.data.packing import Batch
from ablate.model.training.optim_step import DeviceBatch, to_device


class StepGraph:
    """The recorded step."""

    def __init__(
        self,
        step: Callable[[DeviceBatch], Tensor],
        batch_of: Callable[[int], Batch],
        indices: range,
        device: torch.device,
    ) -> None:
        """Record `step` on the first batch without running it.

        `batch_of` returns the batch of a step; `indices` are the steps of the run. Raises KernelUnsupported if
        something in the step waits for the GPU.
        """
        if not indices:
            raise ValueError("a step cannot be recorded without a batch")
        self._batch_of, self._indices = batch_of, indices
        room = max(_num_documents(batch_of(index)) for index in indices)
        self._batch = to_device(batch_of(indices[0]), device, room=room)
        self._in_place = indices[0]
        """Step whose batch the tensors contain."""
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        try:
            with torch.cuda.graph(self._graph):
                self._outcome = step(self._batch)
        except RuntimeError as error:
            raise KernelUnsupported(f"the step cannot be recorded as a CUDA graph: {error}") from error
        self.replays = 0

    def run(self, index: int) -> Tensor:
        """Run step `index` and put the next batch in place; return its outcome, which the next replay overwrites."""
        self._place(index)
        self._graph.replay()
        self.replays += 1
        if index + 1 in self._indices:
            self._place(index + 1)
        return self._outcome

    def _place(self, index: int) -> None:
        """Put the batch of step `index` in place.

        Rows and documents come first, because the host computes them beside the GPU; each copy waits for the replay.
        """
        if index == self._in_place:
            return
        batch = self._batch_of(index)
        replace_documents(self._batch.segment_ids, torch.from_numpy(batch.segment_ids))
        for name, part in batch._asdict().items():
            if name != "segment_ids":
                getattr(self._batch, name).copy_(torch.from_numpy(part))
        self._in_place = index


def _num_documents(batch: Batch) -> int:
    return len(documents(torch.from_numpy(batch.segment_ids)).offsets) - 1
