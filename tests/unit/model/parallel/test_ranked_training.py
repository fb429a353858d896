"""Training by several ranks against training by one process: losses, norms, validation, facts, memory."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ablate.experiments.design.gate import GateValue
from ablate.experiments.design.gates import GATES, with_gates
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.kernels.backends import NODE_CLASSES, Lane
from ablate.model.config import (
    AttentionConfig,
    ExpertsConfig,
    HybridConfig,
    LossKind,
    MambaConfig,
    MeshConfig,
    OptimConfig,
    StepsConfig,
    TrainConfig,
    check_mesh,
)
from ablate.model.data.dataset import Dataset, open_prepared
from ablate.model.data.packing import Batch
from ablate.model.errors import ConfigError
from ablate.model.parallel import data
from ablate.model.parallel.context import PieceExchange
from ablate.model.parallel.ranks import Group, Ranks
from ablate.model.training import ranked_step
from ablate.model.training.loss import cross_entropy
from ablate.model.training.ranked_step import cut
from ablate.model.training.train import TrainResult, train
from tests.ranks import run_ranks
from tests.unit.model.test_train import config_for

TOLERANCE = 1e-5
"""Absolute, in nats over a few steps in float32: sums over rows are grouped by ranks."""


def trained(ranks: Ranks, config: TrainConfig, folder: Path) -> tuple[TrainResult, int]:
    reported: list[Any] = []
    result = train(config, dataset=open_prepared(folder), on_step=reported.append, device=ranks.device, ranks=ranks)
    return result, len(reported)


def drawn(home: Path, seed: int) -> TrainConfig:
    """Draw a geometry, a batch and a way to divide it that is not refused."""
    rng = random.Random(seed)  # noqa: S311  # reproducible draws
    while True:
        devices = rng.choice((2, 4))
        tensor, context = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (4, 1), (2, 2)))
        expert = rng.choice((1, 2, 4))
        sharding = rng.choice(("fsdp", "fsdp", "replicated", "hsdp"))
        model = HybridConfig(
            vocab_size=512,
            d_model=rng.choice((32, 64)),
            pattern="".join(rng.choices("MFA", k=rng.randint(1, 3))) + "E",
            experts=ExpertsConfig(balancing=("bias", "aux_loss")[seed % 2], balance_rate=(0.01, 1.0)[seed % 2]),
            mamba=MambaConfig(
                d_state=rng.choice((8, 12)),
                headdim=rng.choice((8, 16)),
                mimo_rank=rng.choice((1, 2)),
                ngroups=rng.choice((1, 2, 4)),
            ),
            attention=AttentionConfig(num_heads=rng.choice((1, 2, 4))),
        )
        try:
            mesh = MeshConfig(devices=devices, sharding=sharding, tensor=tensor, context=context, expert=expert)  # type: ignore[arg-type]
            config = config_for(
                home,
                model=model,
                mesh=mesh,
                micro_batch=mesh.data * rng.randint(1, 2),
                loss=rng.choice(("dense", "chunked")),
                steps=StepsConfig(warmup=1, timed=2, val_rows=rng.randint(0, 7)),
                seed=seed,
            )
            check_mesh(config)
        except ConfigError:
            continue
        return config


@pytest.mark.parametrize("seed", [1, 2, 3, 13, 17, 18, 24])  # every way to divide; all of range(40) passed by hand
def test_ranks_train_as_one_process_does(seed: int, home: Path, dataset: Dataset) -> None:
    config = drawn(home, seed)
    alone = train(replace(config, mesh=MeshConfig()), dataset=dataset, on_step=lambda _: None)
    results = run_ranks(config.mesh, trained, config, dataset.folder)
    first, _reported = results[0]
    assert [(step.index, step.phase) for step in first.steps] == [(step.index, step.phase) for step in alone.steps]
    for field in ("loss", "grad_norm"):
        ranked, plain = ([getattr(step, field) for step in one.steps] for one in (first, alone))
        np.testing.assert_allclose(ranked, plain, rtol=0, atol=TOLERANCE)
    assert (first.loss_val is None) == (config.steps.val_rows == 0)
    if first.loss_val is not None and alone.loss_val is not None:
        assert first.loss_val == pytest.approx(alone.loss_val, abs=TOLERANCE)
    assert first.parameters == alone.parameters
    assert first.flops_per_step == alone.flops_per_step
    mesh = config.mesh
    added = {"mesh.devices": mesh.devices, "mesh.tensor": mesh.tensor, "mesh.context": mesh.context}
    added |= {"mesh.sharding": mesh.sharding} if mesh.copies > 1 else {}
    added["mesh.expert"] = mesh.expert
    assert first.facts == {**alone.facts, **added}
    assert [number for _, number in results] == [config.steps.total] + [0] * (config.mesh.devices - 1)


def test_two_runs_of_ranks_are_equal_to_the_bit_and_share_the_memory(home: Path, dataset: Dataset) -> None:
    peaks = {}
    for sharding, expert in (("fsdp", 2), ("fsdp", 1), ("replicated", 1)):
        config = config_for(home, steps=StepsConfig(warmup=1, timed=4, val_rows=4, val_every=2))
        config = replace(config, mesh=MeshConfig(devices=2, sharding=sharding, expert=expert))  # type: ignore[arg-type]
        one, two = (run_ranks(config.mesh, trained, config, dataset.folder)[0][0] for _ in range(2))
        assert [step.loss for step in one.steps] == [step.loss for step in two.steps]
        assert one.loss_val == two.loss_val
        assert [validation.step for validation in one.validations or ()] == [3, 5]
        peaks[sharding] = one.peak_allocated_bytes
    assert peaks["fsdp"] < peaks["replicated"]


@pytest.mark.parametrize("loss", ["dense", "chunked"])
def test_gathering_in_bfloat16_rounds_no_number_once_more(loss: LossKind, home: Path, dataset: Dataset) -> None:
    steps = StepsConfig(warmup=0, timed=4, val_rows=0)
    optim = OptimConfig(learning_rate=1e-2, grad_clip=1e6)  # clips nothing: the norm's sum is grouped by shares
    config = config_for(home, dtype="bfloat16", loss=loss, loss_chunk_tokens=16, steps=steps, optim=optim)
    divided, whole = (
        run_ranks(mesh, trained, replace(config, mesh=mesh), dataset.folder)[0][0].steps
        for mesh in (MeshConfig(devices=2), MeshConfig(devices=2, sharding="replicated"))
    )
    assert [step.loss for step in divided] == [step.loss for step in whole]
    norms = ([step.grad_norm for step in steps] for steps in (divided, whole))
    np.testing.assert_allclose(*norms, rtol=0, atol=TOLERANCE)


def of_the_mesh() -> Iterator[Any]:
    for gate in GATES.values():
        for value in gate.values if gate.path.startswith("mesh.") else ():
            if gate.supports(NODE_CLASSES["cpu"], Lane.REFERENCE, value) is None and value not in (1, 8, 16):
                yield pytest.param(gate.name, value, id=f"{gate.name}={value}")


@pytest.mark.parametrize(("name", "value"), list(of_the_mesh()))
def test_every_gate_of_the_mesh_says_that_it_ran(name: str, value: GateValue, home: Path, dataset: Dataset) -> None:
    model = replace(config_for(home).model, attention=AttentionConfig(num_heads=4))
    steps = StepsConfig(warmup=0, timed=1, val_rows=0)
    base = config_for(home, model=model, mesh=MeshConfig(devices=4), steps=steps)
    config = with_gates(base, {name: value})
    check_mesh(config)
    result = run_ranks(config.mesh, trained, config, dataset.folder)[0][0]
    gates = {known: gate.read(config) for known, gate in GATES.items()}
    readings = read_gates(gates, result.facts, pattern=config.model.pattern, devices=4)
    assert readings[name].observed == value
    assert [known for known, reading in readings.items() if not reading.live] == []


def lying(ranks: Ranks, config: TrainConfig, folder: Path, gate: str) -> dict[str, Any]:
    """Train with one kind of division left out in this process; return the facts."""
    patch = pytest.MonkeyPatch()
    if gate == "devices":
        alone = replace(config, mesh=MeshConfig())
        return dict(train(alone, dataset=open_prepared(folder), on_step=lambda _: None, device=ranks.device).facts)
    if gate == "sharding":
        patch.setattr(data, "fully_shard", lambda *_modules, **_options: None)
        patch.setattr(data, "_gather_ahead", lambda _: None)
    elif gate == "tensor_parallel":
        patch.setattr(ranked_step, "divide_layers", lambda *_: frozenset())
        patch.setattr(ranked_step, "cross_entropy", lambda *arguments: cross_entropy(*arguments[:6]))
        patch.setattr(ranked_step.RankedStep, "exchanges", lambda *_: {})  # there are none
    elif gate == "expert_parallel":
        patch.setattr(ranked_step, "divide_experts", lambda *_: {})
    else:
        patch.setattr(ranked_step, "spread_rows", lambda _model, ranks: PieceExchange(ranks.context))
        patch.setattr(ranked_step, "row_piece", lambda batch, _: batch)
    return dict(trained(ranks, config, folder)[0].facts)


@pytest.mark.parametrize("gate", ["devices", "sharding", "tensor_parallel", "context_parallel", "expert_parallel"])
def test_a_division_that_was_asked_for_and_did_not_happen_is_found(gate: str, home: Path, dataset: Dataset) -> None:
    config = config_for(home, mesh=MeshConfig(devices=2), steps=StepsConfig(warmup=0, timed=1, val_rows=0))
    if gate not in ("devices", "sharding"):
        config = with_gates(config, {gate: 2})
    observed = run_ranks(config.mesh, lying, config, dataset.folder, gate)[0]
    gates = {known: entry.read(config) for known, entry in GATES.items()}
    readings = read_gates(gates, observed, pattern=config.model.pattern, devices=2)
    assert [known for known, reading in readings.items() if not reading.live] == [gate]


def test_a_mesh_with_other_gates_that_cannot_run_is_refused_with_the_allowed_values() -> None:
    mesh = MeshConfig(devices=2)
    for changes, said in (
        ({"cuda_graph": True}, r"cuda_graph: is true; exchanges between devices"),
        ({"optim": {"update": "clip_in_update"}}, r"optim.update: is clip_in_update.*allowed with 2 devices: fused"),
        ({"optim": {"algorithm": "muon"}}, r"optim.algorithm: is muon, which needs whole matrices"),
    ):
        config = TrainConfig(mesh=mesh)
        parts = {
            name: replace(getattr(config, name), **part) if isinstance(part, dict) else part
            for name, part in changes.items()
        }
        with pytest.raises(ConfigError, match=said):
            check_mesh(replace(config, **parts))  # type: ignore[arg-type]
    whole = TrainConfig(mesh=replace(mesh, sharding="replicated"))
    check_mesh(replace(whole, optim=replace(whole.optim, algorithm="muon")))


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_cut_without_loss_and_filled_up_with_invalid_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, size, length = int(rng.integers(1, 9)), int(rng.integers(1, 5)), int(rng.integers(1, 6))
    parts = [rng.integers(0, 99, (rows, length)) for _ in range(3)]
    batch = Batch(*parts, valid=rng.random((rows, length)) < 0.7)
    shares = [cut(batch, Group(None, index, size)) for index in range(size)]  # type: ignore[arg-type]
    assert len({share.tokens.shape for share in shares}) == 1
    for number, part in enumerate(batch):
        whole = np.concatenate([share[number] for share in shares])
        np.testing.assert_array_equal(whole[:rows], part)
    assert not np.concatenate([share.valid for share in shares])[rows:].any()
