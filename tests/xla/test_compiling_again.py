"""Trials whose step compiles again, or is not one graph on the device: invalid, run and sealed as by a worker."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.xla_environment import DEVICE  # isort: skip - it decides about the device before torch_xla is imported

from ablate.experiments.documents import write_whole
from ablate.experiments.outcomes import FailureClass, Outcome
from ablate.experiments.records.receipt_check import verify
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.retries import Break
from ablate.model.data.dataset import prepare
from ablate.model.data.packing import Batch
from ablate.model.facts import ModelFact
from ablate.model.training import mesh
from ablate.model.training.mesh import OneDevice
from ablate.model.training.optim_step import DeviceBatch
from ablate.model.training.train import _Trainer
from ablate.workers.blocks.receipt import TrialRecord
from ablate.workers.built_in import training
from ablate.workers.node import find_node
from ablate.workers.paths import WorkPaths
from ablate.workers.processes.runner import Ending
from ablate.workers.trials.result import TrialOrder
from tests.bundles import make_file
from tests.corpora import copy_headers

pytestmark = pytest.mark.timeout(900)
SIZES: dict[str, Any] = {
    "d_model": 32,
    "d_state": 8,
    "headdim": 16,
    "mimo_rank": 2,
    "num_heads": 2,
    "pattern": "M",
    "vocab_size": 512,
}
PLACE = OneDevice._place


def boundaries_as_numbers(device: OneDevice, batch: Batch) -> DeviceBatch:
    """Put the documents' boundaries into the graph as Python numbers, in place of a tensor of document ids."""
    on_device = PLACE(device, batch)
    ids_BS = torch.zeros_like(on_device.segment_ids)
    for row, values in enumerate(batch.segment_ids):
        for cut in np.flatnonzero(values[1:] != values[:-1]) + 1:
            ids_BS[row, int(cut) :] += 1
    return on_device._replace(segment_ids=ids_BS)


def short_documents(folder: Path) -> Path:
    """Write headers in pieces of 300 bytes, so that most rows of 64 tokens hold a boundary; return their folder."""
    corpus = folder / "pieces"
    corpus.mkdir()
    for header in sorted(copy_headers(folder / "corpus").iterdir()):
        text = header.read_text()
        for start in range(0, len(text), 300):
            (corpus / f"{header.stem}-{start:06d}.h").write_text(text[start : start + 300])
    return corpus


def sealed_trial(folder: Path) -> Receipt:
    """Train the baseline of a small ablation as a trial's process does, and make its receipt, for the last time."""
    corpus = short_documents(folder)
    file = make_file(
        workload={
            "recipe": "hybrid-tiny",
            "overrides": {**SIZES, "seq_len": 64, "corpus": str(corpus)},
            "steps": {"warmup": 1, "warmup_s": 0, "timed": 4, "val_rows": 0},
        },
        baseline={"gates": {"lane": "xla"}},
        variants={"remat": {"gates": {"remat": True}}},
        design={"seeds": [1], "blocks": {"count": 2}, "order_seed": 1},
        placement={"node_class": "xla-cpu"},
        verdict={"primary": {"metric": "loss_final", "margin": "0%"}},
    )
    broken = [Break(0, FailureClass.INVALID_MEASUREMENT, "baseline")] * 2
    block = file.claimed(0, attempt_id="att_1", attempt_no=3, broken=broken)
    trial = next(trial for trial in block.trials if trial.arm == "baseline")
    paths = WorkPaths(home=folder).trial(block.attempt_id, trial.trial_id)
    data = folder / "data"
    dataset = prepare(trial.config.data, SIZES["vocab_size"], cache_dir=data, report=lambda _: None)
    order = TrialOrder(
        trial_id=trial.trial_id,
        config=trial.config,
        paths=paths,
        data_dir=data,
        device_type=DEVICE.type,
        dataset=dataset.folder,
    )
    started_at, start = datetime.now(UTC), time.monotonic()
    write_whole(paths.result, training._train(order).model_dump_json())
    ending = Ending(
        stopped=None,
        exit_code=0,
        wall_s=time.monotonic() - start,
        oom_kills=0,
        peak_rss_bytes=None,
        survivors=(),
    )
    record = TrialRecord(
        block=block,
        trial=trial,
        node=find_node("here", "xla-cpu"),
        node_id="nod_1",
        paths=paths,
        ending=ending,
        started_at=started_at,
        load_average=0.0,
        device_events=(None,),
        foreign_busiest=(),
    )
    assert not block.timed  # a loss decides, which an hour of compiling would not change
    return record.receipt()


def test_documents_as_tensors_are_measured(tmp_path: Path) -> None:
    receipt = sealed_trial(tmp_path)
    assert (receipt.outcome, receipt.message) == (Outcome.MEASURED, None)
    assert [step.compilations for step in receipt.steps] == [1, 0, 0, 0, 0, 0]
    assert [(step.graphs, step.host_operations) for step in receipt.steps] == [(1, ())] * 6
    assert ModelFact.GRAPH_CHANGE not in receipt.facts
    assert verify(receipt.model_dump(mode="json")) == []


def test_documents_as_numbers_are_invalid_with_the_difference_of_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneDevice, "_place", boundaries_as_numbers)
    receipt = sealed_trial(tmp_path)
    guilty = next(step.index for step in receipt.steps if step.phase == "timed" and step.compilations)
    change = str(receipt.facts[ModelFact.GRAPH_CHANGE])
    assert (receipt.outcome, receipt.failure_class) == (Outcome.INVALID, FailureClass.INVALID_MEASUREMENT)
    assert receipt.message == f"something was compiled inside the window, first in step {guilty}: {change}"
    assert "instructions are new" in change
    assert "new: " in change
    assert "gone: " in change
    assert verify(receipt.model_dump(mode="json")) == []


UPDATE = mesh.update


def with_read_loss(loss_now: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Read the loss before the backward pass, as logging code might."""
    loss_now.item()
    return UPDATE(loss_now, *rest)


def with_operation_without_lowering(loss_now: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Add 0 times a function that XLA does not know."""
    return UPDATE(loss_now + 0 * torch.special.bessel_j0(loss_now.detach()), *rest)


def with_read_gradient(trainer: _Trainer, index: int) -> torch.Tensor:
    """Read a parameter after the update, as a metric might."""
    outcome = TRAINER_UPDATE(trainer, index)
    trainer.parameters[0].sum().item()
    return outcome


def with_read_batch(trainer: _Trainer, index: int) -> torch.Tensor:
    """Count tokens of the batch, which is on the device already, so that no graph ends."""
    trainer.devices._place(trainer._batch(index)).tokens.nonzero()
    return TRAINER_UPDATE(trainer, index)


TRAINER_UPDATE = _Trainer._update


@pytest.mark.parametrize(
    ("owner", "name", "plant", "problem"),
    [
        (mesh, "update", with_read_loss, "step 2 ran as 2 graphs; allowed: 1"),
        (mesh, "update", with_operation_without_lowering, "step 2 ran as 2 graphs; allowed: 1"),
        (_Trainer, "_update", with_read_gradient, "step 2 ran as 2 graphs; allowed: 1"),
        (_Trainer, "_update", with_read_batch, "operation aten::nonzero ran on the host in step 2"),
    ],
    ids=["loss", "operation", "parameter", "batch"],
)
def test_a_step_that_is_not_one_graph_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, plant: Any, problem: str
) -> None:
    monkeypatch.setattr(owner, name, plant)
    receipt = sealed_trial(tmp_path)
    assert (receipt.outcome, receipt.failure_class) == (Outcome.INVALID, FailureClass.INVALID_MEASUREMENT)
    assert receipt.message == problem
    assert verify(receipt.model_dump(mode="json")) == []
