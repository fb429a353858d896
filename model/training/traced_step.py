"""The training step as one XLA graph: traced on tensors without memory, and the attestation of any such graph.

The graph holds the model, the loss and the optimiser's update. Its inputs are those of a trained step: parameters,
optimiser state, learning rate and batch. Tracing computes nothing and reads no data.

Python code records as facts that it put loops over layers, recomputed values and kernels into the graph. `attest`
checks these facts in the lowered module, which is the compiler's input. A fact that the module contradicts is replaced
by the module's contents, so that its gate is not live.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ablate.kernels import facts
from ablate.kernels.facts import Fact
from ablate.kernels.scan_switches import ScanFact
from ablate.kernels.xla import attention as xla_attention
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla import graph as xla_graph
from ablate.kernels.xla.graph import Graph
from ablate.model import counts, hybrid
from ablate.model.config import TrainConfig
from ablate.model.facts import ModelFact
from ablate.model.training.mesh import XlaMesh, divide_rows
from ablate.model.training.optim_step import DeviceBatch, batch_loss, update
from ablate.model.training.optimizers import AnyOptimizer, optimizer_of


def attest(graph: Graph, observed: facts.Facts, config: TrainConfig) -> None:
    """Correct the facts `observed` during the tracing of one training step, both passes, by its lowered module."""
    if graph.custom_calls:
        observed[ModelFact.KERNELS] = ", ".join(f"{count} {name}" for name, count in graph.custom_calls.items())
    observed.update(dict(_corrections(graph, observed, config)))


def _corrections(graph: Graph, observed: Mapping[str, Fact], config: TrainConfig) -> Iterator[tuple[str, Fact]]:
    yield from _wrong_bytes(graph, observed)
    loops = Counter(graph.loops)
    if observed.get(ModelFact.LOSS) == "chunked":
        trips = int(observed.get(ModelFact.LOSS_TRIPS, 0))
        if not loops[trips]:
            yield ModelFact.LOSS, f"not in the graph: no loop over {trips} chunks of the loss"
        loops[trips] -= 1
    if observed.get(ScanFact.SCHEDULE) != "sequential":  # its loops run over chunks
        yield from _wrong_loops(+loops, observed)
    problem = xla_attention.calls_problem(
        str(observed.get(ModelFact.ATTENTION)), graph.custom_calls, layers=config.model.pattern.count("A")
    )
    if problem is not None:
        yield ModelFact.ATTENTION, problem


def _wrong_bytes(graph: Graph, observed: Mapping[str, Fact]) -> Iterator[tuple[str, Fact]]:
    """Compare the partitions' bytes for backward passes with the bytes that pass the module's barriers."""
    recorded = observed.get(ScanFact.HANDED_BYTES, 0)
    if graph.barrier_bytes == recorded:
        return
    text = f"not in the graph: {recorded} bytes for backward passes, {graph.barrier_bytes} behind barriers"
    for fact in (ScanFact.REMAT, ScanFact.PSIV_CACHE):
        yield fact, text


def _wrong_loops(loops: Mapping[int, int], observed: Mapping[str, Fact]) -> Iterator[tuple[str, Fact]]:
    """Compare the trips of loops over layers. Each loop occurs twice, for both passes."""
    trips = sum(length * number for length, number in loops.items())
    recorded = 2 * int(observed.get(ModelFact.LAYER_TRIPS, 0))
    if trips != recorded:
        text = f"loops of {trips} trips in the graph, {recorded} in the code"
        yield ModelFact.LAYERS_IN_LOOPS, text if trips and recorded else int(trips > 0)


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One training step, lowered but not compiled."""

    module: bytes
    """Serialized HloModuleProto."""
    graph: Graph
    """Contents of the module."""
    facts: Mapping[str, facts.Fact]
    """Facts that the code recorded during the tracing, corrected by the module."""
    parameters: int
    """Trainable parameters."""
    input_bytes: int
    """Bytes of all inputs of the step: parameters, optimiser state, batch."""
    flops_per_step: int
    """Model FLOPs of one step, computed from the configuration."""
    seconds: float
    """Wall seconds of tracing and lowering."""


def trace_step(config: TrainConfig) -> TracedStep:
    """Trace one training step of `config`.

    Raises KernelUnsupported if the lane or a gate cannot run or an operation would run on the host, and the errors of
    model and loss.
    """
    started = time.perf_counter()
    if config.mesh.devices > 1:
        xla_device.use_mesh(config.mesh.devices)
    with facts.collect() as observed:
        facts.record(ModelFact.DEVICE, xla_device.device().type)
        model = _placeholder_model(config)
        optimizer = _placeholder_state(optimizer_of(model, config.optim))
        batch = _placeholder_batch(config)
        if config.mesh.devices > 1:
            mesh = XlaMesh(config, model, xla_device.device())
            mesh.lay_out(optimizer)
            mesh.record()
            batch = divide_rows(batch)
        inputs = [*model.parameters(), *_state(optimizer), *batch]
        input_bytes = sum(tensor.nbytes for tensor in inputs)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with xla_device.OneGraph():  # type: ignore[no-untyped-call]
            loss_now = batch_loss(model, model.lm_head.weight, batch, config)
            outcome = update(loss_now, parameters, optimizer, config)
    module = xla_device.hlo_proto([outcome, *model.parameters(), *_state(optimizer)])
    graph = xla_graph.read_graph(module)
    attest(graph, observed, config)
    return TracedStep(
        module=module,
        graph=graph,
        facts=dict(observed),
        parameters=sum(parameter.numel() for parameter in parameters),
        input_bytes=input_bytes,
        flops_per_step=counts.step_flops(config),
        seconds=time.perf_counter() - started,
    )


def _placeholder_model(config: TrainConfig) -> hybrid.Hybrid:
    with torch.device("meta"):
        model = hybrid.Hybrid(config.model, compute_dtype=getattr(torch, config.dtype))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(xla_device.placeholder(parameter.shape, parameter.dtype)))
    return model


def _placeholder_state(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Give AdamW its state from the second step on, and a learning rate as input."""
    for group in optimizer.param_groups:
        group["lr"] = xla_device.placeholder((), torch.float32)
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": xla_device.placeholder((), torch.float32),
                "exp_avg": xla_device.placeholder(parameter.shape, torch.float32),
                "exp_avg_sq": xla_device.placeholder(parameter.shape, torch.float32),
            }
    return optimizer


def _state(optimizer: AnyOptimizer) -> list[Tensor]:
    return [value for slots in optimizer.state.values() for value in slots.values()]


def _placeholder_batch(config: TrainConfig) -> DeviceBatch:
    shape = (config.micro_batch, config.data.seq_len)
    tokens, targets, segment_ids = (xla_device.placeholder(shape, torch.int64) for _ in range(3))
    return DeviceBatch(tokens, targets, segment_ids, xla_device.placeholder(shape, torch.bool))
