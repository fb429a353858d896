"""Exchanges between ranks in one step: times by a count of moments, bytes by the sizes of what is exchanged."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from ablate.model.config import MeshConfig, StepsConfig
from ablate.model.counts import num_parameters
from ablate.model.data.dataset import Dataset
from ablate.model.errors import MeasurementError
from ablate.model.training.profiled import communication_of, overlap, union
from ablate.model.training.train import TrainResult, train
from tests.ranks import run_ranks
from tests.unit.model.parallel.test_ranked_training import trained
from tests.unit.model.test_train import config_for


def moments(spans: list[tuple[int, int]]) -> set[int]:
    return {moment for begin, end in spans for moment in range(begin, end)}


@pytest.mark.parametrize("seed", range(50))
def test_unions_and_overlaps_are_counts_of_moments(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sets = []
    for _ in range(2):
        begins = rng.integers(0, 40, rng.integers(0, 8))
        sets.append([(int(begin), int(begin + rng.integers(0, 12))) for begin in begins])
    exchanges, others = map(union, sets)
    assert moments(exchanges) == moments(sets[0])
    assert all(earlier[1] < later[0] for earlier, later in pairwise(exchanges))
    hidden = sum(overlap(span, others) for span in exchanges)
    assert hidden == len(moments(sets[0]) & moments(sets[1]))


def test_a_step_without_exchanges_is_no_measurement_of_them() -> None:
    with pytest.raises(MeasurementError, match="saw no exchange between the ranks"):
        communication_of(lambda: torch.zeros(3).add_(1), torch.device("cpu"))


def test_the_bytes_are_those_of_gradients_loss_and_load_of_experts(home: Path, dataset: Dataset) -> None:
    config = config_for(home, steps=StepsConfig(warmup=0, timed=1, val_rows=0))
    alone = train(config, dataset=dataset, on_step=lambda _: None)
    assert (alone.communication_s, alone.exposed_communication_s, alone.communication_bytes) == (None, None, None)
    mesh = MeshConfig(devices=2, sharding="replicated")
    result: TrainResult = run_ranks(mesh, trained, replace(config, mesh=mesh), dataset.folder)[0][0]
    assert result.communication_bytes == 4 * (alone.parameters + 1) + 8 * config.model.experts.num_experts
    assert result.communication_s is not None
    assert result.exposed_communication_s is not None
    assert 0 < result.exposed_communication_s <= result.communication_s < 10


def test_the_bytes_of_experts_are_those_of_rows_and_not_of_gradients(home: Path, dataset: Dataset) -> None:
    config = config_for(home, steps=StepsConfig(warmup=0, timed=1, val_rows=0))
    experts = replace(config.model.experts, routing="balanced")  # so each rank gives as many rows as it takes
    config = replace(config, model=replace(config.model, experts=experts))
    number, width, d_model = experts.num_experts, experts.width, config.model.d_model
    mesh = MeshConfig(devices=2, sharding="replicated", expert=2)
    result: TrainResult = run_ranks(mesh, trained, replace(config, mesh=mesh), dataset.folder)[0][0]
    gradients = 4 * (num_parameters(config.model) - 2 * number * width * d_model)
    rows = config.tokens_per_step // 2 * experts.top_k  # to the experts and back, and so do their gradients
    loss_and_norm, loads = 4 + 4, 8 * number
    assert result.communication_bytes == gradients + loss_and_norm + 2 * loads + 4 * rows * 4 * d_model
