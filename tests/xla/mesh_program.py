"""Train or trace a small hybrid over several virtual devices, and tell it as one JSON line: run by test_mesh_xla.py.

python -m tests.xla.mesh_program '{"home": "/tmp/x", "devices": 4, "asked": {"plain": {}, "whole": {"lie": true}}}'
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.kernels.backends import NODE_CLASSES, Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.scan_switches import ScanSwitches
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla.compiler import Order
from ablate.model.config import (
    AttentionConfig,
    HybridConfig,
    MambaConfig,
    MeshConfig,
    OptimConfig,
    StepsConfig,
    TrainConfig,
)
from ablate.model.data.dataset import prepare
from ablate.model.training.traced_step import trace_step
from ablate.model.training.train import train
from ablate.workers.built_in.training import _xla_device
from ablate.workers.devices.tpu import ask_compiler
from tests.corpora import small_config


def config_of(asked: dict[str, Any], home: Path, devices: int) -> TrainConfig:
    """Return the configuration that the keys of `asked` describe."""
    model = HybridConfig(
        vocab_size=asked.get("vocab_size", 512),
        d_model=asked.get("d_model", 32),
        pattern=asked.get("pattern", "MFA"),
        mamba=MambaConfig(d_state=8, headdim=asked.get("headdim", 16), mimo_rank=2),
        attention=AttentionConfig(num_heads=asked.get("num_heads", 2)),
        scan=ScanSwitches(lane=Lane.XLA),
    )
    return TrainConfig(
        model=model,
        data=small_config(home / "corpus"),
        optim=OptimConfig(learning_rate=1e-2),
        steps=StepsConfig(warmup=0, timed=asked.get("steps", 7), val_rows=6),
        mesh=MeshConfig(devices=devices, sharding=asked.get("sharding", "fsdp")),
        micro_batch=4,
        threads=1,
        seed=11,
    )


def trained(config: TrainConfig, home: Path) -> dict[str, Any]:
    """Train as a worker's trial does."""
    device = _xla_device(config.mesh.devices)
    dataset = prepare(config.data, 512, cache_dir=home / "cache", report=lambda _: None)
    result = train(config, dataset=dataset, on_step=lambda _: None, device=device)
    readings = read_gates({gate.name: gate.read(config) for gate in GATES.values()}, result.facts)
    return {
        "losses": [step.loss for step in result.steps],
        "loss_val": result.loss_val,
        "compilations": [step.compilations for step in result.steps],
        "work": [(step.graphs, step.host_operations) for step in result.steps],
        "facts": dict(result.facts),
        "not_live": [name for name, reading in readings.items() if not reading.live],
    }


def traced(config: TrainConfig, home: Path, *, compiled: bool) -> dict[str, Any]:
    """Trace a step, and compile it for as many chips."""
    step = trace_step(config)
    if not compiled:
        readings = read_gates({gate.name: gate.read(config) for gate in GATES.values()}, step.facts)
        return {"not_live": [name for name, reading in readings.items() if not reading.live]}
    module = home / f"{config.mesh.sharding}.pb"
    module.write_bytes(step.module)
    topology = NODE_CLASSES["tpu-v6e-compile"].topologies[config.mesh.devices]
    answer = ask_compiler(Order(topology=topology, module=str(module), partitions=config.mesh.devices))
    return {
        "chips": answer["chips"],
        "partitions": answer["partitions"],
        "input_bytes": step.input_bytes,
        "topology": answer["topology"],
        "collectives": answer["collectives"],
        **answer["memory"],
    }


@contextmanager
def lie() -> Iterator[None]:
    """Lay everything out whole, whatever is asked."""
    plain = xla_device.divide

    def whole(tensor: torch.Tensor, axis: int | None) -> None:
        plain(tensor, None if tensor.dtype == torch.float32 else axis)

    xla_device.divide = whole
    try:
        yield
    finally:
        xla_device.divide = plain


def answer(asked: dict[str, Any], home: Path, devices: int) -> dict[str, Any]:
    """Do one thing that is asked."""
    config = config_of(asked, home, devices)
    with lie() if asked.get("lie") else nullcontext():
        try:
            if asked.get("trace"):
                return traced(config, home, compiled=asked.get("compile", False))
            return trained(config, home)
        except KernelUnsupported as error:
            return {"refused": str(error)}
        finally:
            xla_device.forget_pending()


def main(order: dict[str, Any]) -> dict[str, Any]:
    """Do everything that is asked, one after the other; return the answers by name."""
    home, devices = Path(order["home"]), order["devices"]
    return {name: answer(asked, home, devices) for name, asked in order["asked"].items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
