"""Gates that were asked for and are not live: a lie is planted in what runs, and the receipt's readings must find it.

Here are the gates that a CPU can run; those of the CUDA lane's kernels are in tests/kernels/test_mamba3_cuda_lies.py.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ablate.experiments.design.gates import GATES, with_gates
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.kernels import facts
from ablate.kernels import mamba3_mimo as operation
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo import ScanInputs
from ablate.kernels.xla.graph import Graph
from ablate.model import hybrid
from ablate.model.config import HybridConfig, StepsConfig, TrainConfig
from ablate.model.data.dataset import Dataset
from ablate.model.facts import ModelFact
from ablate.model.layers import attention, recurrence
from ablate.model.layers.experts import Experts
from ablate.model.training import compiled_adamw, loss, mesh, traced_step, train
from tests.unit.model.test_train import config_for, run

Plant = Callable[[pytest.MonkeyPatch], None]


def another_scan(**switches: Any) -> Plant:
    """The reference lane runs with these switches, whatever it is asked."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = operation.LANES[Lane.REFERENCE]
        lie = replace(plain, run=lambda inputs, asked, final: plain.run(inputs, replace(asked, **switches), final))
        patch.setattr(operation, "LANES", dict.fromkeys(Lane, lie))
        patch.setattr(operation, "supports", lambda *_: None)

    return plant


def scan_in(dtype: torch.dtype) -> Plant:
    """The scan runs in this dtype; what goes in and comes out has the model's, as if nothing had happened."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = operation.LANES[Lane.REFERENCE]

        def lie(inputs: ScanInputs, *asked: Any) -> tuple[torch.Tensor, None]:
            other = {name: getattr(inputs, name).to(dtype) for name in ("q", "k", "v", "z")}
            return plain.run(replace(inputs, **other), *asked)[0].to(inputs.v.dtype), None

        patch.setattr(operation, "LANES", dict.fromkeys(Lane, replace(plain, run=lie)))

    return plant


def dense_loss(patch: pytest.MonkeyPatch) -> None:
    plain = loss.cross_entropy
    patch.setattr(loss, "cross_entropy", lambda *tensors, **named: plain(*tensors[:4]))


def other_attention(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(attention.ATTEND, "flash", attention.ATTEND["sdpa"])


def two_rows(patch: pytest.MonkeyPatch) -> None:
    plain = Dataset.batch
    patch.setattr(Dataset, "batch", lambda self, step, _rows, seed, **named: plain(self, step, 2, seed, **named))


def uncompiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "compile", lambda function, **_: function)


def uncompiled_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compiled_adamw, "_compiler", lambda: compiled_adamw._update)


def float32_model(patch: pytest.MonkeyPatch) -> None:
    plain = hybrid.build
    patch.setattr(hybrid, "build", lambda config: plain(replace(config, dtype="float32")))


def another_model(**changes: Any) -> Plant:
    """The model has these settings in place of those of the configuration."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = hybrid.build
        patch.setattr(hybrid, "build", lambda config: plain(replace(config, model=replace(config.model, **changes))))

    return plant


def other_experts(**changes: Any) -> Plant:
    """The mixtures of experts have these settings, whatever they are asked."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        plain = Experts.__init__

        def lie(self: Experts, config: HybridConfig, *, compute_dtype: torch.dtype) -> None:
            plain(self, replace(config, experts=replace(config.experts, **changes)), compute_dtype=compute_dtype)

        patch.setattr(Experts, "__init__", lie)

    return plant


def looped(patch: pytest.MonkeyPatch) -> None:
    """The recurrence is a loop over tokens, whatever the configuration says."""
    patch.setattr(recurrence, "fused", recurrence.recurrence)


def another_optimizer(**changes: Any) -> Plant:
    """The optimiser and its update have these options, whatever they are asked."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        made, updated = train.optimizer_of, mesh.update
        patch.setattr(
            train, "optimizer_of", lambda named, config, **other: made(named, replace(config, **changes), **other)
        )

        def lie(loss_now: torch.Tensor, parameters: Any, optimizer: Any, config: TrainConfig) -> torch.Tensor:
            return updated(loss_now, parameters, optimizer, replace(config, optim=replace(config.optim, **changes)))

        patch.setattr(mesh, "update", lie)

    return plant


def without_a_graph(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train._Trainer, "record_graph", lambda self: None)


LIES: dict[str, tuple[Any, Plant]] = {
    "schedule": ("sequential", another_scan(schedule="chunk_parallel")),
    "chunk_size": (8, another_scan(chunk_size=16)),
    "psiv_cache": (True, another_scan(psiv_cache=False)),
    "lane": ("cuda", another_scan()),
    "loss": ("chunked", dense_loss),
    "attention": ("flash", other_attention),
    "compile": (True, uncompiled),
    "dtype": ("bfloat16", float32_model),
    "micro_batch": (4, two_rows),
    "projections": ("fp8", another_model(projections="as_dtype")),
    "cuda_graph": (True, without_a_graph),
    "optimizer": ("muon", another_optimizer(algorithm="adamw")),
    "adamw_update": ("compiled", uncompiled_update),
    "adamw_moments": ("bfloat16", another_optimizer(moments="float32")),
    "routing": ("balanced", other_experts(routing="learned")),
    "balancing": ("aux_loss", other_experts(balancing="none")),
    "expert_products": ("loop", other_experts(products="grouped")),
    "recurrence": ("fused", looped),
    "residual": ("bfloat16", another_model(residual="float32")),
    "norm_kernels": ("quack", another_model(norm_kernels="torch")),
}
"""Gate -> what is asked for, and what makes the default run instead."""


def asked(home: Path, changes: dict[str, Any]) -> TrainConfig:
    config = config_for(home, steps=StepsConfig(warmup=0, timed=1, val_rows=4))
    if "recurrence" in changes:
        config = replace(config, model=replace(config.model, pattern="R"))
    return with_gates(config, changes)


def not_live(home: Path, dataset: Dataset, changes: dict[str, Any]) -> list[str]:
    config = asked(home, changes)
    requested = {gate.name: gate.read(config) for gate in GATES.values()}
    readings = read_gates(requested, run(config, dataset).facts)
    return [name for name, reading in readings.items() if not reading.live]


def test_every_gate_is_lied_about_somewhere() -> None:
    of_kernels = {name for name, gate in GATES.items() if gate.in_kernels}
    of_xla = {name for name, gate in GATES.items() if any(map(_not_in_the_reference, gate.lanes.values()))}
    of_launches = {"heads_in_turn"}
    of_ranks = {name for name, gate in GATES.items() if gate.path.startswith("mesh.")}  # test_ranked_training.py
    others = of_kernels | of_launches | of_xla  # test_mamba3_cuda_lies.py, test_xla_lies.py
    assert set(LIES) | others | of_ranks == set(GATES)


def _not_in_the_reference(lanes: tuple[Lane, ...]) -> bool:
    return Lane.XLA in lanes and Lane.REFERENCE not in lanes


def test_readings_of_an_honest_run_are_live(home: Path, dataset: Dataset) -> None:
    assert not_live(home, dataset, {}) == []
    assert not_live(home, dataset, {"schedule": "sequential", "psiv_cache": True, "loss": "chunked"}) == []


@pytest.mark.parametrize(("asked", "runs"), [("bfloat16", torch.float32), ("float32", torch.bfloat16)])
def test_a_scan_in_another_dtype_is_found_though_the_loss_sees_the_one_that_was_asked_for(
    home: Path, dataset: Dataset, asked: str, runs: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan_in(runs)(monkeypatch)
    assert not_live(home, dataset, {"dtype": asked}) == ["dtype"]


@pytest.mark.parametrize("gate", LIES)
def test_a_gate_that_was_asked_for_and_is_not_live_is_found(
    home: Path, dataset: Dataset, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, plant = LIES[gate]
    plant(monkeypatch)
    assert gate in not_live(home, dataset, {**GATES[gate].needs(value), gate: value})


GRAPH = Graph(digest="", instructions=1, custom_calls={}, matmul_flops=0, loops={3: 2, 2: 2, 8: 1}, barrier_bytes=0)
RECORDED: dict[str, Any] = {
    ModelFact.LAYERS_IN_LOOPS: 8,
    ModelFact.LAYER_TRIPS: 5,
    ModelFact.LOSS: "chunked",
    ModelFact.LOSS_TRIPS: 8,
    ModelFact.ATTENTION: "sdpa",
}
"""Facts of a step on XLA with two loops over layers and a loss in 8 chunks."""


@pytest.mark.parametrize(
    ("loops", "recorded", "not_live"),
    [
        ({3: 2, 2: 2, 8: 1}, {}, {}),
        ({8: 3}, {ModelFact.LAYER_TRIPS: 8}, {}),
        ({3: 2, 2: 2}, {}, {"loss": "not in the graph: no loop over 8 chunks of the loss"}),
        (
            {3: 2, 2: 2, 8: 1},
            {ModelFact.LOSS_TRIPS: 7},
            {
                "loss": "not in the graph: no loop over 7 chunks of the loss",
                "scan_layers": "loops of 18 trips in the graph, 10 in the code",
            },
        ),
        ({8: 1}, {}, {"scan_layers": False}),
        ({3: 2, 8: 1}, {}, {"scan_layers": "loops of 6 trips in the graph, 10 in the code"}),
    ],
    ids=["honest", "equal trips", "no loss", "other chunks", "no layers", "one run"],
)
def test_loops_that_the_lowered_step_lacks_are_not_live(
    loops: dict[int, int], recorded: dict[str, Any], not_live: dict[str, Any]
) -> None:
    observed = facts.Facts()
    observed.update({**RECORDED, **recorded})
    traced_step.attest(replace(GRAPH, loops=loops), observed, TrainConfig())
    requested = {name: gate.default for name, gate in GATES.items()}
    requested |= {"lane": "xla", "scan_layers": True, "loss": "chunked"}
    readings = read_gates(requested, observed)
    shown = {name: readings[name].observed for name in ("loss", "scan_layers") if not readings[name].live}
    assert shown == not_live
