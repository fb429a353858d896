"""Training on XLA with this machine's processors: as the reference lane, and compiled once whatever the rows hold."""

import ctypes
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.xla_environment import DEVICE  # isort: skip - it decides about the device before torch_xla is imported

from ablate.experiments.design.gates import GATES
from ablate.experiments.design.kinds.gate_readings import read_gates
from ablate.experiments.errors import SpecError
from ablate.kernels import facts
from ablate.kernels.backends import Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.scan_switches import ScanFact, ScanSwitches
from ablate.kernels.xla import device as xla_device
from ablate.model import hybrid
from ablate.model.config import AttentionConfig, HybridConfig, MambaConfig, OptimConfig, StepsConfig, TrainConfig
from ablate.model.data.dataset import Dataset
from ablate.model.facts import ModelFact
from ablate.model.training.optim_step import DeviceBatch, batch_loss, update
from ablate.model.training.optimizers import optimizer_of
from ablate.model.training.train import TrainResult, train
from tests.corpora import small_config, small_dataset
from tests.factories import make_plan, make_spec

pytestmark = pytest.mark.timeout(900)  # XLA compiles for half a minute on a busy machine
ENVELOPE = 2e-3
"""Nats, over 20 steps: both lanes compute the same in another order, and training amplifies the difference."""
TINY = HybridConfig(
    vocab_size=512,
    d_model=32,
    pattern="MFA",
    mamba=MambaConfig(d_state=8, headdim=16, mimo_rank=2),
    attention=AttentionConfig(num_heads=2),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def dataset(home: Path) -> Dataset:
    return small_dataset(home)


def config_for(home: Path, **changes: Any) -> TrainConfig:
    base = TrainConfig(
        model=TINY,
        data=small_config(home / "corpus"),
        optim=OptimConfig(learning_rate=1e-2),
        steps=StepsConfig(warmup=3, timed=16, val_rows=4),
        micro_batch=4,
        threads=1,
        seed=11,
    )
    return replace(base, **changes)


def on_xla(config: TrainConfig, **switches: Any) -> TrainConfig:
    return replace(config, model=replace(config.model, scan=ScanSwitches(lane=Lane.XLA, **switches)))


def run(config: TrainConfig, dataset: Dataset, device: torch.device) -> TrainResult:
    return train(config, dataset=dataset, on_step=lambda _: None, device=device)


def test_losses_are_those_of_the_reference_lane_and_steps_compile_once(home: Path, dataset: Dataset) -> None:
    config = config_for(home)
    reference = run(config, dataset, torch.device("cpu"))
    result = run(on_xla(config), dataset, DEVICE)
    for ours, theirs in zip(result.steps, reference.steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=ENVELOPE), ours.index
    assert result.loss_val == pytest.approx(reference.loss_val, abs=ENVELOPE)
    assert [step.compilations for step in result.steps] == [1] + [0] * 19
    assert result.facts[ScanFact.LANE] == "xla"
    assert result.facts[ModelFact.DEVICE] == "xla"
    assert result.facts[ModelFact.ATTENTION] == "sdpa"
    assert 0 < result.peak_allocated_bytes == result.peak_reserved_bytes


@pytest.mark.parametrize(
    ("changes", "switches", "tolerance"),
    [
        ({"loss": "chunked", "loss_chunk_tokens": 48}, {"schedule": "sequential", "remat": True}, 1e-3),
        ({"dtype": "bfloat16"}, {"psiv_cache": True, "chunk_size": 32}, 5e-2),
    ],
    ids=["chunked_sequential_remat", "bfloat16_cached"],
)
def test_gates_run_and_keep_the_first_loss(
    home: Path, dataset: Dataset, changes: dict[str, Any], switches: dict[str, Any], tolerance: float
) -> None:
    short = config_for(home, steps=StepsConfig(warmup=1, timed=2, val_rows=0), **changes)
    reference = run(short, dataset, torch.device("cpu"))
    result = run(on_xla(short, **switches), dataset, DEVICE)
    assert result.steps[0].loss == pytest.approx(reference.steps[0].loss, abs=tolerance)
    assert result.steps[-1].compilations == 0
    assert result.facts[ModelFact.LOSS] == short.loss
    assert result.facts[ModelFact.HIDDEN_DTYPE] == short.dtype
    assert result.facts[ScanFact.SCHEDULE] == switches.get("schedule", "chunk_parallel")
    assert result.facts[ScanFact.REMAT] is switches.get("remat", False)


def drawn_config(chance: random.Random, home: Path) -> TrainConfig:
    """Return a configuration that a submission to class xla-cpu accepts, drawn over patterns and gates."""
    while True:
        gates: dict[str, Any] = {"lane": "xla"}
        for gate in GATES.values():
            values = [value for value in gate.values if "xla-cpu" in gate.node_classes(value)]
            values = values[:4] if gate.name == "micro_batch" else values  # more rows take long
            if gate.name != "lane" and gate.unused_because(gates) is None and len(values) > 1 and chance.random() < 0.5:
                gates[gate.name] = chance.choice(values)
        pattern = "".join(chance.choice("MAF") for _ in range(chance.randint(1, 4)))
        sizes = {"d_model": 32, "d_state": 8, "headdim": 16, "mimo_rank": 2, "num_heads": 2, "vocab_size": 512}
        overrides = {**sizes, "pattern": pattern, "seq_len": 64, "loss_chunk_tokens": chance.choice([16, 48])}
        try:
            plan = make_plan(
                make_spec(
                    workload__overrides=overrides,
                    workload__steps={"warmup": 0, "warmup_s": 0, "timed": 2, "val_rows": 0},
                    baseline={"gates": gates},
                    variants={"other": {"gates": {"micro_batch": 2 if gates.get("micro_batch") == 1 else 1}}},
                    placement={"node_class": "xla-cpu"},
                )
            )
        except (SpecError, ValidationError):
            continue
        config = plan.arms[0].config.with_seed(1)
        return replace(config, data=small_config(home / "corpus"))


@pytest.mark.parametrize("seed", range(6))
def test_an_honest_step_is_one_graph_without_work_on_the_host(home: Path, dataset: Dataset, seed: int) -> None:
    config = drawn_config(random.Random(seed), home)  # noqa: S311
    result = run(config, dataset, DEVICE)
    assert {(step.graphs, step.host_operations) for step in result.steps} == {(1, ())}, config
    readings = read_gates(
        {gate.name: gate.read(config) for gate in GATES.values()}, result.facts, pattern=config.model.pattern
    )
    assert {name: reading.observed for name, reading in readings.items() if not reading.live} == {}, config


def recounted() -> xla_device.Work:
    """Return the work of this process from the values of all counters of torch_xla."""
    from torch_xla.debug import metrics

    values = {name: metrics.counter_value(name) for name in metrics.counter_names()}
    return xla_device.Work(
        graphs=values.get("CachedCompile", 0) + values.get("UncachedCompile", 0),
        host_operations={name: value for name, value in values.items() if name.startswith("aten::")},
    )


def test_work_is_a_recount_of_all_counters_and_finds_new_ones(home: Path, dataset: Dataset) -> None:
    run(on_xla(config_for(home, steps=StepsConfig(warmup=1, timed=2, val_rows=0))), dataset, DEVICE)
    before = xla_device.work()
    assert before == recounted()
    assert before.graphs > 0
    first = torch.ones(4, device=DEVICE)
    xla_device.step_boundary()
    (torch.special.bessel_y0(first) + 1).sum().item()  # no other test runs it, so torch_xla has no counter of it yet
    first.nonzero()
    after = xla_device.work()
    assert after == recounted()
    assert "aten::special_bessel_y0" not in before.host_operations
    assert after.since(before) == xla_device.Work(
        graphs=2,
        host_operations={"aten::special_bessel_y0": 1, "aten::_local_scalar_dense": 1, "aten::nonzero": 1},
    )


class Allocations(ctypes.Structure):
    """Result of mallinfo2, a function of the C library glibc; `smblks` is the number of small free pieces."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("others", ctypes.c_size_t * 7),
    )


def unmerged_pieces() -> int:
    """Return the number of small free pieces of memory that the next larger allocation merges."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = Allocations
    before = read().smblks
    bytes(2048)
    return int(before - read().smblks)


def freed_pieces() -> list[int]:
    """Allocate and free 5,000 small pieces of memory, as a step does; return their addresses.

    Keep the list: its own end could merge the pieces.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    pieces = [library.malloc(64) for _ in range(5000)]
    for piece in pieces:
        library.free(ctypes.c_void_p(piece))
    return pieces


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or later")
def test_the_boundary_of_a_step_merges_the_memory_that_the_step_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [freed_pieces()]
    assert unmerged_pieces() > 4000
    monkeypatch.setattr("torch_xla.sync", lambda wait: kept.append(freed_pieces()))
    xla_device.step_boundary()
    assert unmerged_pieces() < 500


def outputs_and_gradients(config: TrainConfig, device: torch.device) -> tuple[dict[str, Tensor], facts.Facts]:
    """Return the hidden states and every parameter's gradient on the host, and the facts."""
    generator = torch.Generator().manual_seed(1)
    tokens_BS, ids_BS = torch.randint(0, 512, (2, 40), generator=generator), (torch.arange(40) // 13).repeat(2, 1)
    weight_BSD = torch.randn(2, 40, config.model.d_model, generator=generator)
    model = hybrid.build(config).to(device)
    with facts.collect() as seen:
        hidden_BSD = model(tokens_BS.to(device), ids_BS.to(device))
    (hidden_BSD * weight_BSD.to(device)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if device.type == "xla":
        xla_device.step_boundary()
    return {name: tensor.detach().cpu() for name, tensor in {**gradients, "hidden": hidden_BSD}.items()}, seen


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    ("pattern", "blocks"), [("MMMFFA", 5), ("MFMF", 4), ("MFMFA", 4), ("AMFAMF", 6)], ids=lambda value: str(value)
)
def test_layers_in_loops_compute_what_the_reference_does(home: Path, pattern: str, blocks: int, remat: bool) -> None:
    config = config_for(home, model=replace(TINY, pattern=pattern))
    expected, _ = outputs_and_gradients(config, torch.device("cpu"))
    looped = on_xla(replace(config, model=replace(config.model, scan_layers=True)), remat=remat)
    actual, seen = outputs_and_gradients(looped, DEVICE)
    assert (seen[ModelFact.LAYERS_IN_LOOPS], seen[ScanFact.REMAT]) == (blocks, remat)
    assert set(actual) == set(expected)
    for name, value in actual.items():
        assert float((value - expected[name]).abs().max() / expected[name].abs().max()) < 1e-3, name


@pytest.mark.parametrize(
    ("negate", "sums"), [(torch.logical_not, [0.0, 1.0]), (torch.bitwise_not, [-2.0, -1.0])], ids=["right", "on bytes"]
)
def test_torch_xla_computes_not_of_a_truth_value_in_a_loop_on_its_byte(negate: Any, sums: list[float]) -> None:
    """Why the partition writes logical_not; once the second line fails, it need not any more."""
    from torch_xla.experimental.scan import scan

    truths, zeros = torch.tensor([[True, False]]).to(DEVICE), torch.zeros(2, device=DEVICE)
    carried, _ = scan(lambda carry, x: (carry + negate(x), None), zeros, truths)
    xla_device.step_boundary()
    assert carried.cpu().tolist() == sums


@pytest.mark.parametrize(("pattern", "blocks"), [("MFA", 0), ("MAMF", 0), ("MMA", 2)])
def test_patterns_without_a_repeated_group_say_that_no_layer_ran_in_a_loop(
    home: Path, pattern: str, blocks: int
) -> None:
    model = replace(TINY, pattern=pattern, scan_layers=True)
    config = on_xla(config_for(home, model=model))
    tokens_BS = torch.ones(1, 16, dtype=torch.int64).to(DEVICE)
    with facts.collect() as seen, torch.no_grad():
        hybrid.build(config).to(DEVICE)(tokens_BS, tokens_BS)
    xla_device.forget_pending()
    assert seen[ModelFact.LAYERS_IN_LOOPS] == blocks


def test_what_a_loop_over_layers_cannot_do_is_refused(home: Path) -> None:
    looped = config_for(home, model=replace(TINY, pattern="MM", scan_layers=True))
    tokens_BS = torch.ones(1, 16, dtype=torch.int64)
    with pytest.raises(KernelUnsupported, match="scan_layers runs on XLA devices; the model is on cpu"):
        hybrid.build(looped)(tokens_BS, tokens_BS)
    with pytest.raises(KernelUnsupported, match="not schedule 'sequential'"):
        hybrid.build(on_xla(looped, schedule="sequential")).to(DEVICE)(tokens_BS.to(DEVICE), tokens_BS.to(DEVICE))
    xla_device.forget_pending()


class Steps:
    """Training steps by hand, with documents told as tensors or as numbers."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._model = hybrid.build(config).to(DEVICE)
        self._optimizer = optimizer_of(self._model, config.optim)
        self._parameters = list(self._model.parameters())
        xla_device.step_boundary()

    def run(self, segment_ids_BS: Tensor) -> tuple[int, str]:
        """Run a step; return how often it compiled, and the hash of its graph."""
        before = xla_device.compilations()
        tokens_BS = torch.ones(4, 64, dtype=torch.int64).to(DEVICE)
        batch = DeviceBatch(tokens_BS, tokens_BS, segment_ids_BS, torch.ones(4, 64, dtype=torch.bool).to(DEVICE))
        loss_now = batch_loss(self._model, self._model.lm_head.weight, batch, self._config)
        loss_and_norm = update(loss_now, self._parameters, self._optimizer, self._config)
        digest = xla_device._xlac()._get_graph_hash([loss_and_norm, *self._parameters]).hex()
        xla_device.step_boundary()
        return xla_device.compilations() - before, digest


def test_documents_as_tensors_are_one_graph_and_as_numbers_one_each(home: Path) -> None:
    steps = Steps(on_xla(config_for(home, model=replace(TINY, pattern="M"))))
    runs = [steps.run((torch.arange(64).repeat(4, 1) * count // 64).to(DEVICE)) for count in (1, 3, 7, 64)]
    assert [compiled for compiled, _ in runs] == [1, 0, 0, 0]
    assert len({digest for _, digest in runs}) == 1
    numbers = []
    for cut in (9, 50):
        ids_BS = torch.zeros(4, 64, dtype=torch.int64, device=DEVICE)
        ids_BS[:, cut:] = 1
        numbers.append(steps.run(ids_BS))
    assert [compiled for compiled, _ in numbers] == [1, 1]
    assert len({digest for _, digest in numbers}) == 2
