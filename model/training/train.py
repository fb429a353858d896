"""The training loop of one trial: step 0, warm-up, timed steps with validations between them, the validation loss.

- Compilation: if code is generated (torch.compile, scan kernels, flex attention), one forward and backward pass runs
  before step 0 and is timed by itself.
- Facts: gate attestation uses the facts of step 0, and the compilers' counters of that first pass. On a GPU the names
  of the kernels of one more step, after all measurements, confirm or correct them.
- CUDA graph: with `cuda_graph` the step is recorded after step 0, and all later steps replay it.
- Warm-up: `steps.warmup_s` of passes without an update, then `steps.warmup` steps, then passes until one compiles
  nothing. So the number of updates before the window does not depend on the machine's speed.
- Garbage: collected before the warm-up. Python's automatic collection is off until the end of the window, because its
  pauses fall into single steps and slow down the next one.
- Validation: the uncompiled module with the same weights, so it compiles nothing. With `steps.val_every` it also runs
  between timed steps; its time is in no step, and load by others during it does not count. One more before the window
  compiles and allocates what these need.
- Memory: on a CPU one more pass, untimed and without an update, measures the memory in tensors.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.utils import deterministic

from ablate.kernels import facts
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla import graph as xla_graph
from ablate.kernels.xla.graph import describe_change
from ablate.model import counts, hybrid
from ablate.model.config import StepsConfig, TrainConfig, generates_code
from ablate.model.data.dataset import Dataset
from ablate.model.data.packing import Batch, visible_pairs
from ablate.model.errors import DataError, NonFiniteLoss, StillCompiling
from ablate.model.facts import ModelFact
from ablate.model.host_load import HostLoad, HostShares
from ablate.model.layers.experts import load_facts
from ablate.model.layers.linear import Linear, QuackRMSNorm, RMSNorm
from ablate.model.measurements import Phase, ProfiledStep, Step, TrialMeasurements, Validation
from ablate.model.parallel.ranks import Ranks
from ablate.model.training import optim_step, traced_step
from ablate.model.training.compilation import (
    Compilation,
    Forward,
    compilations,
    record_compilation,
    start_compilation,
)
from ablate.model.training.compiled_adamw import CompiledAdamW
from ablate.model.training.measurement import MemoryPeak, PeakMeter, read_clock_mhz
from ablate.model.training.mesh import OneDevice, XlaMesh
from ablate.model.training.optim_step import DeviceBatch, batch_loss, update
from ablate.model.training.optimizers import optimizer_of
from ablate.model.training.profiled import attest, kernels_of
from ablate.model.training.ranked_step import RankedStep
from ablate.model.training.step_graph import StepGraph

Yield: TypeAlias = Callable[[], None]
"""Function that lets the other trials run and returns when this trial may continue."""


class Others:
    """The other trials of a block, which run before each slice of this trial and after the last one."""

    def __init__(self, steps: StepsConfig, yield_to: Yield | None) -> None:
        if (steps.slice > 0) != (yield_to is not None):
            state = "present" if yield_to else "absent"
            raise ValueError(f"steps.slice is {steps.slice}, but yield_to_others is {state}; allowed: both or neither")
        self._yield_to = yield_to
        self.waited_s = None if yield_to is None else 0.0
        """Seconds that this trial has waited; None without slices."""

    def run(self, load: HostLoad) -> None:
        """Let the others run. Their work does not count as foreign `load`."""
        if self._yield_to is None or self.waited_s is None:
            return
        load.pause()
        start = time.perf_counter()
        self._yield_to()
        self.waited_s += time.perf_counter() - start
        load.resume()


@contextmanager
def reproducible(config: TrainConfig, device: torch.device, ranks: int = 1) -> Iterator[None]:
    """Seed torch, choose deterministic kernels and the thread count; restore the settings afterwards."""
    threads = torch.get_num_threads()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    if device.type == "cuda":
        # cuBLAS reads it when it creates its handle; torch refuses deterministic mode without it
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(config.seed)
    torch.set_num_threads(threads_of(config, ranks))
    torch.use_deterministic_algorithms(True)
    # filling every new tensor with NaN finds bugs, but would count as the model's time
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.set_num_threads(threads)


def threads_of(config: TrainConfig, ranks: int) -> int:
    """Return the threads of one of `ranks` processes on this machine, which share its cores."""
    return max(1, (config.threads or len(os.sched_getaffinity(0))) // ranks)


@contextmanager
def no_automatic_gc() -> Iterator[None]:
    """Collect garbage now and not again until the end of the block. A step leaves no reference cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


MAX_COMPILING_PASSES = 20
"""Most consecutive passes at the end of the warm-up that may compile something."""


class TrainResult(TrialMeasurements):
    """The measurements of one trial, with its steps."""

    steps: tuple[Step, ...]


Profile: TypeAlias = Callable[[Callable[[], None]], ProfiledStep]
"""Function that runs a step under torch's profiler."""
OnStep: TypeAlias = Callable[[Step], None]


def train(
    config: TrainConfig,
    *,
    dataset: Dataset,
    on_step: OnStep,
    device: torch.device | None = None,
    yield_to_others: Yield | None = None,
    profile: Profile | None = None,
    ranks: Ranks | None = None,
) -> TrainResult:
    """Train `config` from its seed on `dataset` and return the measurements. Calls `on_step` between steps.

    Without a `device` it uses the CUDA device if present, else the CPU. With equal config, data and machine the losses
    are bit-identical. A config with slices needs `yield_to_others`. `profile` gets one more step after all
    measurements, so that it changes none of them. With `ranks` every one of these processes calls this function; the
    first one calls `on_step` and `profile`, and its result is that of all: a step ends when its last rank ends, memory
    is the largest of any rank.

    Raises DataError if the dataset does not fit the config, NonFiniteLoss for a loss or gradient norm that is NaN or
    infinite, and torch.OutOfMemoryError or MemoryError.
    """
    started = time.perf_counter()
    others = Others(config.steps, yield_to_others)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with reproducible(config, device, 1 if ranks is None else ranks.world):
        meter = PeakMeter(device)
        trainer = _Trainer(config, dataset, device, started=started, ranks=ranks)
        steps, observed, shares = _run_steps(trainer, on_step, others)
        curve = tuple(trainer.validations)
        loss_val = curve[-1].loss if curve else trainer.validate()
        peaks = trainer.devices.gather(trainer.peak(meter))
        trainer.explain_compilations(steps, observed)
        trainer.attest_kernels(observed)
        exchanged = trainer.devices.exchanges(trainer.again)
        training_s = time.perf_counter() - started - (others.waited_s or 0.0)
        profiled = trainer.profiled(profile)
    return TrainResult(
        steps=steps,
        warmup_passes=tuple(trainer.warmup_passes),
        foreign_load=shares.foreign,
        stolen_load=shares.stolen,
        training_began_s=started,
        waited_s=others.waited_s,
        loss_val=loss_val,
        validations=curve or None,
        compile_s=trainer.devices.agree(trainer.compilation.seconds)[0],
        compile_cache_hit=trainer.compilation.cache_hit,
        facts=dict(observed),
        kernels=tuple(observed.kernels.values()),
        parameters=trainer.devices.num_parameters,
        flops_per_step=counts.step_flops(config),
        document_flops_per_step=counts.document_flops(config, trainer.mean_pairs()),
        peak_allocated_bytes=max(peak.allocated_bytes for peak in peaks),
        peak_reserved_bytes=max(peak.reserved_bytes for peak in peaks),
        training_s=training_s,
        **exchanged,
        **({} if profiled is None else profiled._asdict()),
    )


def _run_steps(
    trainer: "_Trainer", on_step: OnStep, others: Others
) -> tuple[tuple[Step, ...], facts.Facts, HostShares]:
    """Run every step in its phase; return the records, the facts of step 0, and the load by others after step 0."""
    records: list[Step] = []

    def run(phase: Phase, indices: range) -> None:
        for index in indices:
            records.append(trainer.step(index, phase))
            if trainer.devices.is_first:
                on_step(records[-1])

    with facts.collect() as observed:
        facts.record(ModelFact.DEVICE, trainer.device.type)
        for layer in trainer.projections:
            facts.record(ModelFact.PROJECTIONS, layer.products)
        for norm in trainer.norms:
            facts.record(ModelFact.NORM_KERNELS, "quack" if isinstance(norm, QuackRMSNorm) else "torch")
        trainer.compile()
        run("compile", range(1))
        trainer.attest(observed)
    trainer.record_graph()
    load, validated = HostLoad(trainer.processor_s), frozenset(trainer.config.steps.validated)
    with no_automatic_gc():
        trainer.load()
        run("warmup", range(1, 1 + trainer.config.steps.warmup))
        if validated:
            trainer.validate()  # compiles and allocates what the later ones need
        trainer.settle()
        for indices in trainer.config.steps.slices:
            others.run(load)
            for index in indices:
                run("timed", range(index, index + 1))
                if index in validated:
                    trainer.validate_after(index, load)
        shares = load.shares()
    others.run(load)
    observed.update(trainer.expert_load)
    observed[ModelFact.CUDA_GRAPH] = trainer.replays >= trainer.config.steps.timed
    return tuple(records), observed, shares


class _Trainer:
    """Model, optimiser and data of one trial."""

    def __init__(
        self,
        config: TrainConfig,
        dataset: Dataset,
        device: torch.device,
        *,
        started: float,
        ranks: Ranks | None = None,
    ) -> None:
        _check_fit(config, dataset)
        self.config = config
        self.device = device
        self.compilation = Compilation()
        self.warmup_passes: list[float] = []
        self.validations: list[Validation] = []
        """Those of the schedule."""
        self._started = started
        self._last_compilations = 0
        """Compilations during the last step or pass."""
        self._first_module: bytes | None = None
        """Lowered graph of step 0, on XLA."""
        self._dataset = dataset
        self._model = hybrid.build(config)
        self.devices = _devices_of(config, self._model, device, ranks)
        self._forward: Forward = self._model
        self._optimizer = optimizer_of(self._model, config.optim, capturable=config.cuda_graph)
        self.devices.lay_out(self._optimizer)
        self._graph: StepGraph | None = None
        self._wait()  # on XLA this creates parameters and state, outside the first step
        self.devices.agree()  # the ranks begin together
        self.parameters = self.devices.parameters

    @property
    def projections(self) -> list[Linear]:
        """Linear maps of the blocks."""
        return [module for module in self._model.blocks.modules() if isinstance(module, Linear)]

    @property
    def norms(self) -> list[RMSNorm]:
        """Norms of the residual stream."""
        return [*(cast(hybrid.ResidualBlock, block).norm for block in self._model.blocks), self._model.final_norm]

    def compile(self) -> None:
        """Compile what the config generates, by one forward and backward pass on the first batch."""
        if not generates_code(self.config):
            return
        start = time.perf_counter()
        self._forward = start_compilation(self.config, self._model, by_block=self.devices.world > 1)
        # step 0 records the facts of a pass, so the counters of this pass are collected apart
        with facts.collect() as of_pass:
            self.one_pass()
            if isinstance(self._optimizer, CompiledAdamW):
                self._optimizer.compile()
        self._wait()
        self.compilation = record_compilation(self.config, time.perf_counter() - start, of_pass)

    def load(self) -> None:
        """Run passes for the seconds of the warm-up."""
        end = time.perf_counter() + self.config.steps.warmup_s
        while self.devices.agree(end - time.perf_counter()) > (0,):
            self._warmup_pass()

    def settle(self) -> None:
        """Run passes until one compiles nothing, if the last step compiled something. Raises StillCompiling."""
        for _ in range(MAX_COMPILING_PASSES):
            if self._last_compilations == 0:
                return
            self._warmup_pass()
        raise StillCompiling(f"{MAX_COMPILING_PASSES} passes in a row after the warm-up compiled something")

    def _warmup_pass(self) -> None:
        start, before = time.perf_counter(), compilations()
        self.one_pass()
        self._wait()
        self.warmup_passes.append(time.perf_counter() - start)
        self._last_compilations = int(*self.devices.agree(compilations() - before))

    def step(self, index: int, phase: Phase) -> Step:
        """Run one optimiser step and wait for the device once, at its end."""
        before, on_xla = compilations(), self.device.type == "xla"
        work_before = xla_device.work() if on_xla else None
        start = time.perf_counter()
        loss_and_norm = self._update(index)
        if index == 0 and on_xla:
            self._first_module = xla_device.hlo_proto(self._outputs(loss_and_norm))
        self._wait()  # on XLA the step is one graph, which runs here
        loss_value, norm_value = loss_and_norm.tolist()
        end = time.perf_counter()
        work = None if work_before is None else xla_device.work().since(work_before)
        end, compiled = self.devices.agree(end, compilations() - before)
        self._last_compilations = int(compiled)
        record = Step(
            index=index,
            phase=phase,
            seconds=end - start,
            began_s=start - self._started,
            ended_s=end - self._started,
            compilations=self._last_compilations,
            graphs=None if work is None else work.graphs,
            host_operations=None if work is None else tuple(sorted(work.host_operations)),
            tokens=self.config.tokens_per_step,
            loss=loss_value,
            grad_norm=norm_value,
            clock_mhz=read_clock_mhz(self.device),
        )
        _check_finite(record)
        return record

    def _update(self, index: int) -> Tensor:
        """Begin step `index`. On XLA this only records the step, which runs at the next wait."""
        optim_step.set_learning_rate(self._optimizer, optim_step.learning_rate(index, self.config.optim))
        if self._graph is not None:
            return self._graph.run(index)
        return self.devices.update(self.devices.loss(self._forward, self._batch(index)), self._optimizer)

    def _step(self, batch: DeviceBatch) -> Tensor:
        loss = batch_loss(self._forward, self._model.lm_head.weight, batch, self.config)
        return update(loss, self.parameters, self._optimizer, self.config)

    @property
    def expert_load(self) -> dict[str, facts.Fact]:
        """Load of the experts in the last step."""
        return dict(load_facts(self._model, self.config.mesh.copies))

    def record_graph(self) -> None:
        """Record the step as a CUDA graph, if the config says so, for all later steps. Raises KernelUnsupported."""
        if not self.config.cuda_graph:
            return
        if self.device.type != "cuda":
            raise KernelUnsupported(f"CUDA graphs run on NVIDIA GPUs; the model is on {self.device.type}")
        self._graph = StepGraph(self._step, self._batch, range(1, self.config.steps.total), self.device)

    @property
    def replays(self) -> int:
        """Number of steps that replayed the graph."""
        return 0 if self._graph is None else self._graph.replays

    def _outputs(self, loss_and_norm: Tensor) -> list[Tensor]:
        return [loss_and_norm, *self.parameters, *self._state()]

    def attest(self, observed: facts.Facts) -> None:
        """Correct the facts of step 0 by the graph that ran, and record the layout on the devices."""
        if self._first_module is not None:
            traced_step.attest(xla_graph.read_graph(self._first_module), observed, self.config)
        self.devices.record()

    def attest_kernels(self, observed: facts.Facts) -> None:
        """Correct the facts by the kernels of one more step on a GPU, and combine those of all processes."""
        if self.device.type == "cuda":
            kernels = kernels_of(self.again)
            attest(kernels, observed, projections=len(self.projections))
        self.devices.join(observed)

    def explain_compilations(self, steps: Iterable[Step], observed: facts.Facts) -> None:
        """If a timed step compiled on XLA, record how its graph differs from the last graph before the window.

        Both steps run again, because their graphs no longer exist.
        """
        compiled = next((step.index for step in steps if step.phase == "timed" and step.compilations), None)
        if compiled is None or self.device.type != "xla":
            return
        before, after = (self._graph_again(index) for index in (self.config.steps.warmup, compiled))
        observed[ModelFact.GRAPH_CHANGE] = describe_change(before, after)

    def _graph_again(self, index: int) -> str:
        text = xla_device.hlo_text(self._outputs(self._update(index)))
        self._wait()
        return text

    def mean_pairs(self) -> float:
        """Return the mean of `visible_pairs` over the batches of the window."""
        timed = range(1 + self.config.steps.warmup, self.config.steps.total)
        window = self.config.model.attention.window
        return sum(visible_pairs(self._batch(index).segment_ids, window) for index in timed) / len(timed)

    def processor_s(self) -> float:
        """Return the processor time of all processes of the step."""
        return sum(self.devices.gather(time.process_time()))

    def profiled(self, profile: Profile | None) -> ProfiledStep | None:
        """Return one more step under the profiler of the first process, if it profiles; the others compute it, too."""
        if self.devices.agree(profile is not None) == (0,):
            return None
        if profile is None or not self.devices.is_first:
            self.again()
            return None
        return profile(self.again)

    def again(self) -> None:
        """Run the last step of the window once more."""
        self._update(self.config.steps.total - 1)
        self._wait()

    def validate_after(self, index: int, load: HostLoad) -> None:
        """Record the validation after step `index`; what others do meanwhile does not count as foreign `load`.

        Raises NonFiniteLoss if its loss is NaN or infinite.
        """
        start = time.perf_counter()
        load.pause()
        loss = self.validate()
        load.resume()
        end = time.perf_counter()
        if loss is None or not math.isfinite(loss):
            raise NonFiniteLoss(f"the validation loss after step {index} is {loss}")
        began_s, ended_s = start - self._started, end - self._started
        self.validations.append(Validation(step=index, loss=loss, began_s=began_s, ended_s=ended_s))

    def validate(self) -> float | None:
        """Return the mean loss over the valid tokens of the validation rows, or None without validation rows."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        num_valid = 0
        with torch.no_grad():
            for batch in self._dataset.val_batches(self.config.steps.val_rows, self.config.micro_batch):
                count = int(batch.valid.sum())
                total += self.devices.loss(self._model, batch).double() * count
                num_valid += count
                self._wait()
        return float(self.devices.total(total)) / num_valid if num_valid else None

    def one_pass(self) -> None:
        """Run one forward and backward pass without an update."""
        self.devices.backward(self.devices.loss(self._forward, self._batch(0)))
        self._wait()  # before the gradients are dropped, because XLA does not compute unreferenced values
        self._model.zero_grad(set_to_none=True)

    def peak(self, meter: PeakMeter) -> MemoryPeak:
        """Return the peak memory of this process.

        Of several processes on a CPU it is the least of so many passes that each process has seen its least one twice:
        a thread of gloo may free a buffer late.
        """
        readings = [meter.read(self.one_pass, state_bytes=self.state_bytes())]
        if self.devices.world == 1 or self.device.type != "cpu":
            return readings[0]
        while self.devices.agree(_is_unsure(readings)) > (0,):
            readings.append(meter.read(self.one_pass, state_bytes=self.state_bytes()))
        return min(readings, key=lambda reading: reading.allocated_bytes)

    def state_bytes(self) -> int:
        """Return the bytes in parameters and optimiser state."""
        return sum(self.devices.stored(tensor).nbytes for tensor in (*self.parameters, *self._state()))

    def _state(self) -> Iterator[Tensor]:
        values = (value for slots in self._optimizer.state.values() for value in slots.values())
        return (value for value in values if isinstance(value, Tensor))

    def _batch(self, step: int) -> Batch:
        data = self.config.data
        batch = self._dataset.batch(step, self.config.micro_batch, self.config.seed, second_share=data.second_share)
        return batch.joined() if data.documents == "joined" else batch

    def _wait(self) -> None:
        self.devices.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "xla":
            xla_device.step_boundary()


def _devices_of(config: TrainConfig, model: hybrid.Hybrid, device: torch.device, ranks: Ranks | None) -> OneDevice:
    if ranks is not None:
        return RankedStep(config, model, ranks)
    if config.mesh.devices == 1:
        return OneDevice(config, model, device)
    if device.type != "xla":
        raise ValueError(f"a step over {config.mesh.devices} devices of type {device.type} needs its ranks")
    return XlaMesh(config, model, device)


def _check_fit(config: TrainConfig, dataset: Dataset) -> None:
    """Raise DataError if the dataset does not fit the config."""
    if dataset.seq_len != config.data.seq_len:
        raise DataError(f"data.seq_len is {config.data.seq_len}; the dataset was packed for {dataset.seq_len}")
    if dataset.val_row != config.data.val_row:
        raise DataError(f"validation rows have {config.data.val_row} tokens; the dataset's have {dataset.val_row}")
    if dataset.vocab_size > config.model.vocab_size:
        raise DataError(
            f"model.vocab_size is {config.model.vocab_size}; the dataset's tokenizer needs {dataset.vocab_size}"
        )
    if config.steps.val_rows > len(dataset.val):
        raise DataError(
            f"steps.val_rows is {config.steps.val_rows}; allowed: 0 to {len(dataset.val)}, the validation rows"
        )


MAX_MEMORY_PASSES = 8


def _is_unsure(readings: list[MemoryPeak]) -> bool:
    """Return whether the least reading was seen once only, and another pass may be tried."""
    sizes = [reading.allocated_bytes for reading in readings]
    return sizes.count(min(sizes)) < 2 and len(sizes) < MAX_MEMORY_PASSES


def _check_finite(record: Step) -> None:
    for name, value in (("loss", record.loss), ("gradient norm", record.grad_norm)):
        if value is None or not math.isfinite(value):
            raise NonFiniteLoss(f"the {name} of step {record.index} ({record.phase}) is {value}")
