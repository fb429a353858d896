"""The whole training step as one XLA graph, traced on tensors without memory: nothing is computed, no data is read.

The graph holds the model of `model.hybrid`, the loss and the update of `model.training.update`. Parameters, optimiser
state, learning rate and batch are its inputs, as in a trained step.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels import facts, xla_device, xla_graph, xla_mesh
from kernels.xla_graph import Graph
from model import flops, hybrid
from model.config import TrainConfig
from model.facts import ModelFact
from model.training import optim, step_graph
from model.training.mesh import Mesh
from model.training.update import DeviceBatch, batch_loss, update


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One training step, lowered and not compiled."""

    module: bytes
    """Serialized HloModuleProto."""
    graph: Graph
    """What the module contains."""
    facts: Mapping[str, facts.Fact]
    """What the code said about itself while it was traced, corrected by the module."""
    parameters: int
    """Trainable parameters."""
    input_bytes: int
    """Bytes of everything that the step reads: parameters, optimiser state, batch."""
    flops_per_step: int
    """Model FLOPs of one step, counted from the configuration."""
    seconds: float
    """Wall seconds of tracing and lowering."""


def trace_step(config: TrainConfig) -> TracedStep:
    """Trace one training step of `config`.

    Raises KernelUnsupported where the lane or a gate cannot run, and the errors of model and loss.
    """
    started = time.perf_counter()
    if config.mesh.devices > 1:
        xla_mesh.use_mesh(config.mesh.devices)
    with facts.collect() as observed:
        facts.record(ModelFact.DEVICE, xla_device.device().type)
        model = _placeholder_model(config)
        optimizer = _placeholder_state(optim.adamw(model.named_parameters(), config.optim))
        batch = _placeholder_batch(config)
        if config.mesh.devices > 1:
            mesh = Mesh(config, model, optimizer)
            mesh.record()
            batch = mesh.lay_out(batch)
        inputs = [*model.parameters(), *_state(optimizer), *batch]
        input_bytes = sum(tensor.nbytes for tensor in inputs)
        loss_now = batch_loss(model, model.lm_head.weight, batch, config)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        outcome = update(loss_now, parameters, optimizer, config)
    module = xla_device.hlo_proto([outcome, *model.parameters(), *_state(optimizer)])
    graph = xla_graph.read_graph(module)
    step_graph.attest(graph, observed, config)
    return TracedStep(
        module=module,
        graph=graph,
        facts=dict(observed),
        parameters=sum(parameter.numel() for parameter in parameters),
        input_bytes=input_bytes,
        flops_per_step=flops.step_flops(config),
        seconds=time.perf_counter() - started,
    )


def _placeholder_model(config: TrainConfig) -> hybrid.Hybrid:
    with torch.device("meta"):
        model = hybrid.Hybrid(config.model, compute_dtype=getattr(torch, config.dtype))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(xla_device.placeholder(parameter.shape, parameter.dtype)))
    return model


def _placeholder_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give AdamW the state that it has from its second step on, and the rate that every step brings."""
    for group in optimizer.param_groups:
        group["lr"] = xla_device.placeholder((), torch.float32)
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": xla_device.placeholder((), torch.float32),
                "exp_avg": xla_device.placeholder(parameter.shape, torch.float32),
                "exp_avg_sq": xla_device.placeholder(parameter.shape, torch.float32),
            }
    return optimizer


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for slots in optimizer.state.values() for value in slots.values()]


def _placeholder_batch(config: TrainConfig) -> DeviceBatch:
    shape = (config.micro_batch, config.data.seq_len)
    tokens, targets, segment_ids = (xla_device.placeholder(shape, torch.int64) for _ in range(3))
    return DeviceBatch(tokens, targets, segment_ids, xla_device.placeholder(shape, torch.bool))
