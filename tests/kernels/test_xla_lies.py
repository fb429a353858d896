"""Gates of lane xla that were asked for and are not live: a lie is planted in what is traced, the readings find it.

Most leave what the code says of itself untouched: only the lowered step shows them. Those about several devices are in
test_mesh_xla.py, because they need a process of their own.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.xla_environment import DEVICE  # isort: skip - it decides about the device before torch_xla is imported

from ablate.experiments.design.gates import GATES, with_gates
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.mamba3_mimo.xla import scan
from ablate.kernels.scan_switches import ScanSwitches
from ablate.kernels.xla import attention as xla_attention
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla import partition as xla_partition
from ablate.kernels.xla.partition import Partition
from ablate.model.config import AttentionConfig, DataConfig, HybridConfig, MambaConfig, TrainConfig
from ablate.model.facts import ModelFact
from ablate.model.layers import layer_loops
from ablate.model.training import loss
from ablate.model.training.traced_step import trace_step

pytestmark = pytest.mark.timeout(900)
Plant = Callable[[pytest.MonkeyPatch], None]

BASE = TrainConfig(
    model=HybridConfig(
        vocab_size=512,
        d_model=64,
        pattern="MMFA",
        mamba=MambaConfig(d_state=8, headdim=32, mimo_rank=2),
        attention=AttentionConfig(num_heads=2),
        scan=ScanSwitches(lane=Lane.XLA, chunk_size=32),
    ),
    data=DataConfig(seq_len=128),
    micro_batch=2,
    loss_chunk_tokens=64,
)


@pytest.fixture(autouse=True)
def _traced_anew() -> Iterator[None]:
    """Graphs of the scan are kept by contract: one that was made by a lie must not be found by an honest test."""
    scan._graph.cache_clear()
    yield
    scan._graph.cache_clear()
    assert DEVICE.type == "xla"


def not_live(changes: dict[str, Any], pattern: str = BASE.model.pattern) -> dict[str, Any]:
    """Trace a step of the default configuration with the gates in `changes`; return the readings that are not live."""
    config = with_gates(replace(BASE, model=replace(BASE.model, pattern=pattern)), changes)
    observed = trace_step(config).facts
    xla_device.forget_pending()
    readings = read_gates({gate.name: gate.read(config) for gate in GATES.values()}, observed, pattern=pattern)
    return {name: reading.observed for name, reading in readings.items() if not reading.live}


def partition_ignores_the_switch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scan, "Partition", lambda **fields: Partition(**{**fields, "remat": False}))


def partitioned_graph_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """The function is cut as asked, elsewhere; what runs is the function as it was."""

    def plain(function: Callable[..., Any], partition: Partition) -> Callable[..., Any]:
        cut = xla_partition.differentiable(function, partition)

        def run(*tensors: torch.Tensor) -> Any:
            copies = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)
            cut(*copies)[0].sum().backward()
            return function(*tensors)

        return run

    patch.setattr(scan, "differentiable", plain)


def backward_may_be_traced_back(patch: pytest.MonkeyPatch) -> None:
    """Without the barrier the compiler finds that values are made twice, and makes them once."""
    patch.setattr(xla_device, "barrier", list)


def loop_is_unrolled(patch: pytest.MonkeyPatch) -> None:
    def unrolled(body: Callable[..., Any], carry: Any, xs: Any, _partition: object) -> tuple[Any, None]:
        stacked, ids = xs
        for index in range(len(ids)):
            of_blocks = [{name: tensor[index] for name, tensor in block.items()} for block in stacked]
            carry, _ = body(carry, (of_blocks, ids[index]))
        return carry, None

    patch.setattr(xla_device, "loop", unrolled)


def blocks_run_one_by_one(patch: pytest.MonkeyPatch) -> None:
    def one_by_one(run: Any, x_BSD: torch.Tensor, segment_ids_BS: torch.Tensor) -> torch.Tensor:
        for block in run.blocks:
            x_BSD = layer_loops._sum(block(x_BSD, None, segment_ids_BS))
        return x_BSD

    patch.setattr(layer_loops._Run, "__call__", one_by_one)


def loop_of_half_the_trips(patch: pytest.MonkeyPatch) -> None:
    plain = xla_device.loop

    def half(body: Callable[..., Any], carry: Any, xs: Any, partition: Partition) -> tuple[Any, Any]:
        return plain(body, carry, tree_map(lambda tensor: tensor[: len(tensor) // 2], xs), partition)

    patch.setattr(xla_device, "loop", half)


def chunks_one_by_one(patch: pytest.MonkeyPatch) -> None:
    def unrolled(body: Callable[..., Any], carry: Any, xs: Any) -> tuple[Any, Any]:
        outputs = []
        for index in range(len(xs[0])):
            carry, output = body(carry, [tensor[index] for tensor in xs])
            outputs.append(output)
        return carry, torch.stack(outputs)

    patch.setattr(xla_device, "loop_without_gradients", unrolled)


def dense_loss_with_the_name_of_chunks(patch: pytest.MonkeyPatch) -> None:
    def dense(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, *rest: Any) -> torch.Tensor:
        outcome = DENSE_LOSS(hidden_TD, weight_VD, *rest)
        facts._collectors[-1][ModelFact.LOSS] = "chunked"
        return outcome

    patch.setattr(loss._Chunked, "apply", lambda *tensors: dense(*tensors[:-1]))


DENSE_LOSS = loss._dense


def dense_in_place_of(kernel: str) -> Plant:
    """Attention is written out and calls itself the kernel's name."""

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run_BS: torch.Tensor, **_: Any) -> torch.Tensor:
        visible = (run_BS[:, :, None] == run_BS[:, None]).tril().unsqueeze(1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    return lambda patch: patch.setitem(xla_attention.KERNELS, kernel, dense)


def another_kernel(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(xla_attention.KERNELS, "flash", xla_attention.KERNELS["splash"])


def forward_kernel_alone(patch: pytest.MonkeyPatch) -> None:
    """The backward pass does not reach the kernel."""
    plain = xla_attention.KERNELS["splash"]
    patch.setitem(
        xla_attention.KERNELS, "splash", lambda q, k, v, run_BS, **named: plain(q, k, v, run_BS, **named).detach() + q
    )


LIES: dict[str, tuple[str, Any, Plant, str]] = {
    "remat, switch ignored": ("remat", True, partition_ignores_the_switch, "M"),
    "remat, graph dropped": ("remat", True, partitioned_graph_is_dropped, "M"),
    "remat, no barrier": ("remat", True, backward_may_be_traced_back, "M"),
    "layers, unrolled": ("scan_layers", True, loop_is_unrolled, "MM"),
    "layers, one by one": ("scan_layers", True, blocks_run_one_by_one, "MM"),
    "layers, group unrolled": ("scan_layers", True, loop_is_unrolled, "MFMF"),
    "layers, half the trips": ("scan_layers", True, loop_of_half_the_trips, "MFMFMFMF"),
    "loss, unrolled": ("loss", "chunked", chunks_one_by_one, "F"),
    "loss, dense": ("loss", "chunked", dense_loss_with_the_name_of_chunks, "F"),
    "flash, dense": ("attention", "flash", dense_in_place_of("flash"), "A"),
    "splash, dense": ("attention", "splash", dense_in_place_of("splash"), "A"),
    "pallas_softcap, dense": ("attention", "pallas_softcap", dense_in_place_of("pallas_softcap"), "A"),
    "flash, splash": ("attention", "flash", another_kernel, "A"),
    "splash, forward alone": ("attention", "splash", forward_kernel_alone, "A"),
}
"""What is lied about -> gate, the value that is asked for, what makes something else run, and the blocks it is in."""

HONEST: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, BASE.model.pattern),
    "all at once": (
        {"remat": True, "scan_layers": True, "attention": "flash", "loss": "chunked"},
        BASE.model.pattern,
    ),
    "groups": ({"remat": True, "scan_layers": True, "loss": "chunked"}, "MAFMAFF"),
    "groups, saved": ({"scan_layers": True}, "MAFMAFF"),
    "loops over chunks": ({"schedule": "sequential", "loss": "chunked"}, "MF"),
    **{f"{gate}={value}": ({gate: value}, pattern) for gate, value, _, pattern in LIES.values()},
}
"""Everything that is lied about, as it is without the lie."""


@pytest.mark.parametrize("asked", HONEST)
def test_readings_of_an_honest_step_are_live(asked: str) -> None:
    assert not_live(*HONEST[asked]) == {}


@pytest.mark.parametrize("lie", LIES)
def test_a_gate_that_is_not_in_the_lowered_step_is_found(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, value, plant, pattern = LIES[lie]
    plant(monkeypatch)
    assert gate in not_live({gate: value}, pattern)


def test_a_loop_that_nobody_asked_for_is_found() -> None:
    plain = replace(BASE, model=replace(BASE.model, scan_layers=True))
    observed = dict(trace_step(plain).facts)
    xla_device.forget_pending()
    assert observed[ModelFact.LAYERS_IN_LOOPS] == 2
    reading = read_gates({gate.name: gate.read(BASE) for gate in GATES.values()}, observed)["scan_layers"]
    assert (reading.requested, reading.observed, reading.live) == (False, True, False)


def test_gates_of_this_lane_alone_are_lied_about_here() -> None:
    alone = {name for name, gate in GATES.items() if name != "lane" and (Lane.XLA,) in gate.lanes.values()}
    assert alone == {"scan_layers"}
    assert alone <= {gate for gate, *_ in LIES.values()}
