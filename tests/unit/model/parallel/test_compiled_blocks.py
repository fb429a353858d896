"""Blocks that torch's compiler traces, on several ranks: every gradient against one device, in float64.

Most tests trace without generating code, which takes seconds instead of minutes.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.model.config import (
    AttentionConfig,
    ExpertsConfig,
    HybridConfig,
    MambaConfig,
    MeshConfig,
    Sharding,
    StepsConfig,
    TrainConfig,
)
from ablate.model.data.dataset import Dataset, open_prepared
from ablate.model.data.packing import Batch
from ablate.model.facts import ModelFact
from ablate.model.hybrid import Hybrid, build
from ablate.model.parallel.ranks import Ranks
from ablate.model.training import compilation
from ablate.model.training.compilation import start_compilation
from ablate.model.training.loss import cross_entropy
from ablate.model.training.ranked_step import RankedStep
from ablate.model.training.train import TrainResult, train
from tests.ranks import run_ranks
from tests.unit.model.parallel.test_tensor import batch_of
from tests.unit.model.test_train import config_for

LIMIT = 1e-13
"""Largest error of a gradient in float64, relative to its norm: sums over rows are grouped by ranks."""

MODEL = HybridConfig(
    vocab_size=260,
    d_model=16,
    pattern="MFAFMFAF",
    mamba=MambaConfig(d_state=8, headdim=8, mimo_rank=2),
    attention=AttentionConfig(num_heads=2),
    experts=ExpertsConfig(num_experts=4, width=8, shared_width=8, products="loop"),
)


def in_float64(config: TrainConfig) -> Hybrid:
    """Return a model without equal numbers that computes in float64 throughout."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]  # this process runs nothing else
    model = build(config).double()
    model.compute_dtype = model._residual_dtype = torch.float64
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float64
    return model


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients by the names of the parameters."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}  # type: ignore[misc]


def wide(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Compile `graph` without generating code; what layers keep in float32 is float64. Tracing ignores patches."""
    for node in graph.graph.find_nodes(op="call_method", target="float"):
        node.target = "double"
    graph.recompile()
    return lookup_backend("aot_eager")(graph, inputs)


def on_host(batch: Any) -> Batch:
    return Batch(*(part.numpy().copy() for part in batch))


def of_one_device(config: TrainConfig, batch: Any, _ranks: Ranks) -> dict[str, Tensor]:
    model = in_float64(config)
    rest = (batch.targets, batch.valid, config.loss)
    cross_entropy(model(batch.tokens, batch.segment_ids), model.lm_head.weight, *rest).backward()  # type: ignore[no-untyped-call]
    return gradients_of(model)


def of_layers_not_compiled(config: TrainConfig, batch: Any, ranks: Ranks) -> dict[str, Tensor]:
    """Return the gradients of this rank's share of every layer, which test_tensor.py compares with one device."""
    model = in_float64(config)
    step = RankedStep(config, model, ranks)
    step.backward(step.loss(model, on_host(batch)))
    return gradients_of(model)


def outcome(ranks: Ranks, config: TrainConfig) -> tuple[dict[str, float], int, bool]:
    """Return the error of every gradient, the number of graphs, and whether repeats are equal to the bit."""
    compilation.torch.compile = partial(torch.compile, backend=wide)  # type: ignore[attr-defined]
    batch = batch_of(config)
    length = batch.tokens.shape[1] // config.mesh.context * config.mesh.context
    batch = Batch(*(part[:, :length] for part in batch))
    expected = (of_one_device if config.mesh.tensor == 1 else of_layers_not_compiled)(config, batch, ranks)
    model = in_float64(config)
    step = RankedStep(config, model, ranks)
    forward = start_compilation(config, model, by_block=True)
    passes = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        step.backward(step.loss(forward, on_host(batch)))
        passes.append(gradients_of(model))
    for name in step.experts:  # one rank's part of a matrix
        expected[name] = ranks.expert.part(expected[name], 0)
    worst = {name: float((passes[-1][name] - grad).norm() / grad.norm()) for name, grad in expected.items()}
    equal = all(torch.equal(passes[0][name], later[name]) for later in passes[1:] for name in expected)
    return worst, counters["stats"]["unique_graphs"], equal


def config_of(pattern: str, devices: int, sharding: Sharding, seed: int, **mesh_sizes: int) -> TrainConfig:
    mesh = MeshConfig(devices=devices, sharding=sharding, **mesh_sizes)
    model = replace(MODEL, pattern=pattern)
    return TrainConfig(model=model, mesh=mesh, compile=True, micro_batch=4, loss_chunk_tokens=16, seed=seed)


@pytest.mark.parametrize(
    ("pattern", "devices", "sharding", "mesh_sizes"),
    [
        ("MFA", 2, "fsdp", {}),
        ("FA", 2, "replicated", {}),
        ("FAF", 4, "hsdp", {}),
        ("EA", 2, "fsdp", {}),
        ("EAE", 2, "fsdp", {"expert": 2}),
        ("RF", 2, "fsdp", {}),
        ("MFAM", 2, "fsdp", {"context": 2}),
        ("AMA", 4, "fsdp", {"context": 4}),
        ("MFA", 2, "fsdp", {"tensor": 2}),
        ("EMA", 4, "fsdp", {"tensor": 2, "context": 2}),
        ("MAE", 4, "fsdp", {"context": 2, "expert": 2}),
    ],
)
def test_gradients_of_compiled_blocks_are_those_of_other_blocks_and_repeats_are_equal_to_the_bit(
    pattern: str, devices: int, sharding: Sharding, mesh_sizes: dict[str, int]
) -> None:
    config = config_of(pattern, devices, sharding, seed=devices, **mesh_sizes)
    for worst, graphs, equal in run_ranks(config.mesh, outcome, config):
        assert max(worst.values()) < LIMIT, worst
        assert graphs > 0
        assert equal


def test_a_block_is_traced_once_for_each_of_its_kinds() -> None:
    shallow, deep = (config_of(pattern, 2, "fsdp", seed=1) for pattern in ("FFAF", "FFAF" * 2))
    counts = [run_ranks(config.mesh, outcome, config)[0][1] for config in (shallow, deep)]
    assert counts[0] == counts[1] > 0


def trained(ranks: Ranks, config: TrainConfig, folder: Path) -> TrainResult:
    return train(config, dataset=open_prepared(folder), on_step=lambda _: None, device=ranks.device, ranks=ranks)


def partly_compiled(ranks: Ranks, config: TrainConfig, folder: Path) -> TrainResult:
    if ranks.rank:
        torch.compile = lambda function, **_: function  # type: ignore[assignment]
    return trained(ranks, config, folder)


def compiled_config(home: Path, pattern: str = "F", **changes: Any) -> TrainConfig:
    config = config_for(home, compile=True, steps=StepsConfig(warmup=1, timed=2, val_rows=4), **changes)
    return replace(config, model=replace(config.model, pattern=pattern))


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "mesh_sizes"), [("F", {}), ("MA", {"context": 2}), ("FA", {"tensor": 2})])
def test_training_by_compiled_ranks_follows_one_process_and_says_that_it_was_compiled(
    home: Path, dataset: Dataset, pattern: str, mesh_sizes: dict[str, int]
) -> None:
    config = compiled_config(home, pattern, mesh=MeshConfig(devices=2, **mesh_sizes))
    alone = train(replace(config, mesh=MeshConfig(), compile=False), dataset=dataset, on_step=lambda _: None)
    first, again = (run_ranks(config.mesh, trained, config, dataset.folder) for _ in range(2))
    result = first[0]
    np.testing.assert_allclose([step.loss for step in result.steps], [step.loss for step in alone.steps], atol=1e-4)
    assert result.loss_val == pytest.approx(alone.loss_val, abs=1e-4)
    assert [step.loss for step in result.steps] == [step.loss for step in again[0].steps]
    assert (result.compile_s > 0, again[0].compile_cache_hit) == (True, True)
    assert [step.compilations for step in result.steps if step.phase == "timed"] == [0, 0]
    assert not_live(config, result) == []


def not_live(config: TrainConfig, result: TrainResult) -> list[str]:
    gates = {name: gate.read(config) for name, gate in GATES.items()}
    readings = read_gates(gates, result.facts, pattern=config.model.pattern, devices=config.mesh.devices)
    return [name for name, reading in readings.items() if not reading.live]


@pytest.mark.slow
def test_a_rank_that_does_not_compile_is_found(home: Path, dataset: Dataset) -> None:
    config = compiled_config(home, mesh=MeshConfig(devices=2, sharding="replicated"))
    result = run_ranks(config.mesh, partly_compiled, config, dataset.folder)[0]
    assert result.facts[ModelFact.COMPILED_GRAPHS] == "mixed"
    assert not_live(config, result) == ["compile"]
