"""The recorded step reads the batch of its own number, whichever numbers run."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from ablate.kernels.documents import documents, once_per_batch, with_documents
from ablate.model.data.packing import Batch
from ablate.model.training import step_graph
from ablate.model.training.optim_step import DeviceBatch

ROWS, LENGTH, STEPS = 2, 12, 9


class Replay:
    """Stands for a CUDA graph on a processor: runs the recorded step again."""

    def __init__(self, events):
        self.events = events

    def replay(self):
        self.events.append("replay")
        self.step()


@pytest.fixture
def events(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Replay(events))
    monkeypatch.setattr(torch.cuda, "graph", lambda _graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(step_graph, "to_device", on_processor)
    return events


def on_processor(batch, device, *, room):
    tokens, targets, ids, valid = (torch.from_numpy(part).clone() for part in batch)
    return DeviceBatch(tokens, targets, with_documents(ids, device, room=room), valid)


def batches(seed):
    """Draw a batch for every step, with none to eleven changes of the document in a row."""
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(STEPS):
        changes = generator.random((ROWS, LENGTH)) < generator.random()
        tokens = generator.integers(0, 99, (ROWS, LENGTH + 1))
        drawn.append(Batch(tokens[:, :-1], tokens[:, 1:], changes.cumsum(1), generator.random((ROWS, LENGTH)) < 0.5))
    return drawn


def contents(batch):
    """Return all that a step can read of a batch on the host."""
    offsets = documents(torch.from_numpy(batch.segment_ids)).offsets
    return [*(part.tolist() for part in batch), [int(offset) for offset in offsets]]


def recorded(seed, events):
    """Return the batches, the recorded step and what its replays have read."""
    drawn, reads = batches(seed), []

    def step(batch):
        offsets = once_per_batch(batch.segment_ids, documents).offsets.unique_consecutive()
        reads.append([*(part.tolist() for part in batch), offsets.tolist()])
        return torch.zeros(2)

    def batch_of(index):
        events.append(index)
        return drawn[index]

    graph = step_graph.StepGraph(step, batch_of, range(1, STEPS), torch.device("cpu"))
    graph._graph.step = lambda: step(graph._batch)
    reads.clear()
    events.clear()
    return drawn, graph, reads


@pytest.mark.parametrize("seed", range(12))
def test_every_replay_reads_the_batch_of_its_step(events, seed):
    drawn, graph, reads = recorded(seed, events)
    generator = np.random.default_rng(seed)
    jumps = generator.integers(1, STEPS, 6).tolist()
    order = [*range(1, STEPS), STEPS - 1, *jumps]
    for index in order:
        graph.run(index)
    assert reads == [contents(drawn[index]) for index in order]
    assert graph.replays == len(order)


def test_the_next_batch_is_made_after_the_replay_has_begun(events):
    _, graph, _ = recorded(0, events)
    for index in range(1, STEPS):
        graph.run(index)
    expected = [event for index in range(1, STEPS) for event in ("replay", index + 1)]
    assert events == expected[:-1]  # nothing follows the last step


def test_a_run_without_steps_is_refused():
    with pytest.raises(ValueError, match="without a batch"):
        step_graph.StepGraph(lambda _batch: torch.zeros(2), lambda _index: None, range(1, 1), torch.device("cpu"))
