"""The training loop of one trial: step 0, warm-up, timed steps, then the validation loss.

What would surprise: where code is generated (torch.compile, scan kernels, flex attention), one forward and backward
pass runs before step 0, so that compilation is a number of its own; the facts for gate attestation are what the code
recorded during step 0, and what the compilers told of that pass. The warm-up lasts `steps.warmup_s` of passes without
an update, then `steps.warmup` steps, and ends with something that compiled nothing: the number of updates before the
window is fixed, whatever the machine's speed. Garbage is collected before the warm-up, and Python's automatic
collection is off until the window's end: its pauses land in single steps, and one slows the next step down.
Validation runs the uncompiled module on the same weights, so it compiles nothing. On a CPU one more pass, not timed and
without an update, shows the memory in tensors (model.training.measurement).
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils import deterministic

from kernels import facts, xla_device, xla_graph
from kernels.xla_graph import describe_change
from model import counts, hybrid
from model.config import StepsConfig, TrainConfig, generates_code
from model.data.dataset import Dataset
from model.data.packing import Batch
from model.errors import DataError, NonFiniteLoss, StillCompiling
from model.facts import ModelFact
from model.measurements import Phase, Step, TrialMeasurements
from model.training import optim_step, traced_step
from model.training.compilation import (
    Compilation,
    Forward,
    compilations,
    record_compilation,
    start_compilation,
)
from model.training.measurement import HostLoad, HostShares, PeakMeter, read_clock_mhz
from model.training.mesh import Mesh
from model.training.optim_step import DeviceBatch, batch_loss, update

Yield: TypeAlias = Callable[[], None]
"""Lets the others run; returns when this trial is to go on."""


class Others:
    """The other trials of a block, as one of them sees them: they run before each of its slices and after the last."""

    def __init__(self, steps: StepsConfig, yield_to: Yield | None) -> None:
        if (steps.slice > 0) != (yield_to is not None):
            there = "somebody" if yield_to else "nobody"
            raise ValueError(f"steps.slice is {steps.slice}, and there is {there} to yield to between slices")
        self._yield_to = yield_to
        self.waited_s = None if yield_to is None else 0.0
        """Seconds for which this trial waited so far; None where it runs in one go."""

    def run(self, load: HostLoad) -> None:
        """Let the others run, which are no foreign `load`."""
        if self._yield_to is None or self.waited_s is None:
            return
        load.pause()
        start = time.perf_counter()
        self._yield_to()
        self.waited_s += time.perf_counter() - start
        load.resume()


@contextmanager
def reproducible(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Seed torch, choose deterministic kernels and the thread count; put the settings back afterwards."""
    threads = torch.get_num_threads()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        # cuBLAS reads it when its handle is made; torch refuses deterministic mode without it.
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds bugs, and would be measured here as the model's time.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_num_threads(threads)


@contextmanager
def no_automatic_gc() -> Iterator[None]:
    """Collect garbage now and not again until the end of the block; a step leaves no reference cycles behind."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


MAX_COMPILING_PASSES = 20
"""Passes in a row that may compile something at the end of the warm-up."""


class TrainResult(TrialMeasurements):
    """The measurements of one trial, with its steps."""

    steps: tuple[Step, ...]


OnStep: TypeAlias = Callable[[Step], None]


def train(
    config: TrainConfig,
    *,
    dataset: Dataset,
    on_step: OnStep,
    device: torch.device | None = None,
    yield_to_others: Yield | None = None,
) -> TrainResult:
    """Train `config` from its seed on `dataset` and measure it; `on_step` is called between steps.

    Without a `device` it uses the CUDA device where there is one, else the CPU. Config, data and machine being equal,
    losses are bit-identical. A config with slices needs `yield_to_others`.

    Raises
    ------
    DataError
        When the dataset does not fit the config.
    NonFiniteLoss
        When a loss or gradient norm is NaN or infinite.
    torch.OutOfMemoryError, MemoryError
        As they come.

    """
    started = time.perf_counter()
    others = Others(config.steps, yield_to_others)
    _check_fit(config, dataset)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with reproducible(config, device):
        meter = PeakMeter(device)
        trainer = _Trainer(config, dataset, device, started=started)
        steps, observed, shares = _run_steps(trainer, on_step, others)
        loss_val = trainer.validate()
        peak = meter.read(trainer.one_pass, held_bytes=trainer.held_bytes())
        trainer.explain_compilations(steps, observed)
    return TrainResult(
        steps=steps,
        warmup_passes=tuple(trainer.warmup_passes),
        foreign_load=shares.foreign,
        stolen_load=shares.stolen,
        training_began_s=started,
        waited_s=others.waited_s,
        loss_val=loss_val,
        compile_s=trainer.compilation.seconds,
        compile_cache_hit=trainer.compilation.cache_hit,
        facts=dict(observed),
        kernels=tuple(observed.kernels.values()),
        parameters=sum(parameter.numel() for parameter in trainer.parameters),
        flops_per_step=counts.step_flops(config),
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=peak.reserved_bytes,
        training_s=time.perf_counter() - started - (others.waited_s or 0.0),
    )


def _run_steps(
    trainer: "_Trainer", on_step: OnStep, others: Others
) -> tuple[tuple[Step, ...], facts.Facts, HostShares]:
    """Run every step in its phase; return the records, the facts of step 0, and the load by others after it."""
    records: list[Step] = []

    def run(phase: Phase, indices: range) -> None:
        for index in indices:
            records.append(trainer.step(index, phase))
            on_step(records[-1])

    with facts.collect() as observed:
        facts.record(ModelFact.DEVICE, trainer.device.type)
        trainer.compile()
        run("compile", range(1))
        trainer.attest(observed)
    load = HostLoad()
    with no_automatic_gc():
        trainer.load()
        run("warmup", range(1, 1 + trainer.config.steps.warmup))
        trainer.settle()
        for indices in trainer.config.steps.slices:
            others.run(load)
            run("timed", indices)
        shares = load.shares()
    others.run(load)
    return tuple(records), observed, shares


class _Trainer:
    """Model, optimiser and data of one trial."""

    def __init__(self, config: TrainConfig, dataset: Dataset, device: torch.device, *, started: float) -> None:
        self.config = config
        self.device = device
        self.compilation = Compilation()
        self.warmup_passes: list[float] = []
        self._started = started
        self._compiled_last = 0
        """Compilations during the last step or pass."""
        self._first_module: bytes | None = None
        """Lowered graph of step 0, on XLA."""
        self._dataset = dataset
        self._model = hybrid.build(config).to(device)
        self._forward: Forward = self._model
        self._optimizer = optim_step.adamw(self._model.named_parameters(), config.optim)
        self._mesh = Mesh(config, self._model, self._optimizer) if config.mesh.devices > 1 else None
        self._wait()  # on XLA parameters and state are made here, apart from the first step
        self.parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def compile(self) -> None:
        """Compile what the config generates, by one forward and backward pass on the first batch."""
        if not generates_code(self.config):
            return
        start = time.perf_counter()
        self._forward = start_compilation(self.config, self._model)
        # Step 0 records the facts of a pass: counters must count it once.
        with facts.collect() as seen:
            self.one_pass()
        self._wait()
        self.compilation = record_compilation(self.config, time.perf_counter() - start, seen)

    def load(self) -> None:
        """Run passes until the seconds of the warm-up are over."""
        end = time.perf_counter() + self.config.steps.warmup_s
        while time.perf_counter() < end:
            self._warmup_pass()

    def settle(self) -> None:
        """Run passes until one compiled nothing, if the last step did. Raises StillCompiling."""
        for _ in range(MAX_COMPILING_PASSES):
            if self._compiled_last == 0:
                return
            self._warmup_pass()
        raise StillCompiling(f"{MAX_COMPILING_PASSES} passes in a row after the warm-up compiled something")

    def _warmup_pass(self) -> None:
        start, before = time.perf_counter(), compilations()
        self.one_pass()
        self._wait()
        self.warmup_passes.append(time.perf_counter() - start)
        self._compiled_last = compilations() - before

    def step(self, index: int, phase: Phase) -> Step:
        """Run one optimiser step and wait for the device once, at its end."""
        before = compilations()
        start = time.perf_counter()
        told = self._update(index)
        if index == 0 and self.device.type == "xla":
            self._first_module = xla_device.hlo_proto(self._outputs(told))
        self._wait()  # on XLA the step is one graph, which runs here
        loss_value, norm_value = told.tolist()
        end = time.perf_counter()
        self._compiled_last = compilations() - before
        record = Step(
            index=index,
            phase=phase,
            seconds=end - start,
            began_s=start - self._started,
            ended_s=end - self._started,
            compilations=self._compiled_last,
            tokens=self.config.tokens_per_step,
            loss=loss_value,
            grad_norm=norm_value,
            clock_mhz=read_clock_mhz(self.device),
        )
        _check_finite(record)
        return record

    def _update(self, index: int) -> Tensor:
        """Begin step `index`: on XLA it is recorded and runs when it is waited for."""
        optim_step.set_learning_rate(self._optimizer, optim_step.learning_rate(index, self.config.optim))
        loss_now = self._loss(self._forward, self._batch(index))
        return update(loss_now, self.parameters, self._optimizer, self.config)

    def _outputs(self, told: Tensor) -> list[Tensor]:
        return [told, *self.parameters, *self._state()]

    def attest(self, observed: facts.Facts) -> None:
        """Hold what was observed in step 0 against the graph that ran, and against what lies on the devices."""
        if self._first_module is not None:
            traced_step.attest(xla_graph.read_graph(self._first_module), observed, self.config)
        if self._mesh is not None:
            self._mesh.record()

    def explain_compilations(self, steps: Iterable[Step], observed: facts.Facts) -> None:
        """Where a step of the window compiled on XLA, record how its graph differs from that before the window.

        Both steps run once more: their graphs were gone when it was known.
        """
        guilty = next((step.index for step in steps if step.phase == "timed" and step.compilations), None)
        if guilty is None or self.device.type != "xla":
            return
        before, after = (self._graph_again(index) for index in (self.config.steps.warmup, guilty))
        observed[ModelFact.GRAPH_CHANGE] = describe_change(before, after)

    def _graph_again(self, index: int) -> str:
        told = self._update(index)
        text = xla_device.hlo_text(self._outputs(told))
        self._wait()
        return text

    def validate(self) -> float | None:
        """Return the mean loss over the valid tokens of the validation rows; None when there are none to evaluate."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        num_valid = 0
        with torch.no_grad():
            for batch in self._dataset.val_batches(self.config.steps.val_rows, self.config.micro_batch):
                count = int(batch.valid.sum())
                total += self._loss(self._model, batch).double() * count
                num_valid += count
                self._wait()
        return float(total) / num_valid if num_valid else None

    def one_pass(self) -> None:
        """Run one forward and backward pass without an update."""
        self._loss(self._forward, self._batch(0)).backward()  # type: ignore[no-untyped-call]
        self._wait()  # before the gradients are dropped: XLA does not compute what nobody holds
        self._optimizer.zero_grad(set_to_none=True)

    def held_bytes(self) -> int:
        """Return the bytes in parameters and optimiser state."""
        return sum(tensor.nbytes for tensor in (*self.parameters, *self._state()))

    def _state(self) -> Iterator[Tensor]:
        values = (value for slots in self._optimizer.state.values() for value in slots.values())
        return (value for value in values if isinstance(value, Tensor))

    def _batch(self, step: int) -> Batch:
        return self._dataset.batch(step, self.config.micro_batch, self.config.seed)

    def _loss(self, forward: Forward, batch: Batch) -> Tensor:
        return batch_loss(forward, self._model.lm_head.weight, self._on_device(batch), self.config)

    def _on_device(self, batch: Batch) -> DeviceBatch:
        on_device = DeviceBatch(*(torch.from_numpy(part).to(self.device) for part in batch))
        return on_device if self._mesh is None else self._mesh.lay_out(on_device)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "xla":
            xla_device.step_boundary()


def _check_fit(config: TrainConfig, dataset: Dataset) -> None:
    """Raise DataError before anything is built when the dataset cannot serve the config."""
    if dataset.seq_len != config.data.seq_len:
        raise DataError(f"data.seq_len is {config.data.seq_len}; the dataset was packed for {dataset.seq_len}")
    if dataset.vocab_size > config.model.vocab_size:
        raise DataError(
            f"model.vocab_size is {config.model.vocab_size}; the dataset's tokenizer needs {dataset.vocab_size}"
        )
    if config.steps.val_rows > len(dataset.val):
        raise DataError(
            f"steps.val_rows is {config.steps.val_rows}; allowed: 0 to {len(dataset.val)}, the rows held out"
        )


def _check_finite(record: Step) -> None:
    for name, value in (("loss", record.loss), ("gradient norm", record.grad_norm)):
        if not math.isfinite(value):
            raise NonFiniteLoss(f"the {name} of step {record.index} ({record.phase}) is {value}")
