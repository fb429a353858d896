"""The built-in model in the process of its trial: its dataset, training or compilation, and the pipe of slices.

This module imports torch only inside functions, as `ablate.workers.processes.trial` does.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ablate.experiments.in_trial.ablate_profile import kernel_facts, kernel_table, profiler, step_trace
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.compilation_report import CompilationReport, HbmPlan
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.xla.compiler import Order
from ablate.model.data.corpus import BUILT_IN, NAMED
from ablate.model.errors import DataError, DatasetDamaged, MeasurementError
from ablate.model.measurements import KernelFacts, ProfiledStep, StepTrace
from ablate.workers.devices.tpu import Answer, ask_compiler, find_overflow
from ablate.workers.environment_variables import peer_site
from ablate.workers.errors import CompilerFailed, DeviceMissing
from ablate.workers.isolation.environment import compile_in_process, keep_kernels, meet_on_this_machine, start_cold
from ablate.workers.paths import is_allowed
from ablate.workers.trials.result import TrialOrder, TrialResult
from ablate.workers.trials.turns import yield_to_others

if TYPE_CHECKING:
    import torch

    from ablate.model.measurements import Step
    from ablate.model.parallel.ranks import Ranks
    from ablate.model.training.traced_step import TracedStep


def check_corpus(corpus: str, roots: Sequence[Path] | None) -> None:
    """Raise DataError unless `corpus`, links and `..` resolved, is below one of `roots`; None allows any folder.

    Files below it need no check of their own, because a corpus leaves links out (model/data/corpus.py).
    """
    if corpus in BUILT_IN or is_allowed(Path(corpus), roots):
        return
    allowed = "".join(f", or a folder below {root}" for root in roots or ())
    raise DataError(
        f"corpus {corpus!r} is outside of the folders that this node's operator allows; allowed: {NAMED}"
        f"{allowed} (ABLATE_CORPUS_DIRS)"
    )


def prepare_data(order: TrialOrder) -> TrialResult:
    """Make the dataset of `order` from its corpus."""
    from ablate.model.data.dataset import prepare

    config = order.model
    for corpus in config.data.corpora:
        check_corpus(corpus, order.corpus_roots)
    dataset = prepare(config.data, config.model.vocab_size, cache_dir=order.data_dir, report=_log_preparation)
    return TrialResult.partial(data_digest=dataset.digest, data_folder=dataset.folder)


def run_model(order: TrialOrder) -> TrialResult:
    """Train the model of `order`, or only compile its step."""
    return _train(order) if order.topology is None else compile_step(order, order.topology)


def ranks_of(order: TrialOrder) -> int:
    """Return the number of processes that share the steps of a trial. On XLA one process has all devices."""
    alone = order.prepare_only or order.device_type == "xla" or order.config.own_process
    return 1 if alone else order.devices


def run_rank(order: TrialOrder, rank: int) -> TrialResult:
    """Train the model of `order` as one of several ranks."""
    import torch

    from ablate.model.parallel.ranks import Ranks, join

    config = order.model
    device = find_device(order.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    meet_on_this_machine()
    join(rank, config.mesh.devices, order.paths.folder / "ranks", device)
    return _train(order, Ranks(config.mesh, device))


def _train(order: TrialOrder, ranks: "Ranks | None" = None) -> TrialResult:
    from ablate.model.data.dataset import open_prepared
    from ablate.model.layers import mamba3
    from ablate.model.training import train

    config = order.model
    if order.dataset is None:
        raise DatasetDamaged("no dataset was prepared for this trial")
    dataset = open_prepared(order.dataset)
    if order.cold_caches:
        start_cold(order.paths.caches)
    elif order.kernels is not None:
        keep_kernels(order.kernels, order.caches)
    if order.isolation is not None and order.device_type == "cuda" and os.geteuid() == 0:
        compile_in_process()
    mamba3.use_lane(config.model.scan.lane, peer_site())
    wait = None if order.slice_pipe is None else partial(yield_to_others, order.slice_pipe)
    is_first = ranks is None or ranks.rank == 0
    with (order.paths.steps if is_first else Path(os.devnull)).open("w", buffering=1, encoding="utf-8") as steps:
        result = train.train(
            config,
            dataset=dataset,
            on_step=partial(_write_step, steps),
            device=find_device(order.device_type, config.mesh.devices) if ranks is None else ranks.device,
            yield_to_others=wait,
            profile=partial(profile_step, traced=order.trace) if order.profile else None,
            ranks=ranks,
        )
    if order.cold_caches and is_first:
        shutil.rmtree(order.paths.caches, ignore_errors=True)
    return TrialResult(
        data_digest=dataset.digest,
        val_digest=dataset.val_digest,
        data_folder=dataset.folder,
        **result.model_dump(exclude={"steps"}),
    )


def profile_step(step: Callable[[], None], *, traced: bool) -> ProfiledStep:
    """Run a step under torch's profiler; return its kernels, or its operators where the processor computes."""
    import torch

    with profiler(torch) as profile:
        step()
    rows = tuple(kernel_table(profile.key_averages()))
    if not rows:
        raise MeasurementError("torch's profiler saw no kernel in the profiled step")
    facts = kernel_facts(profile, [row[0] for row in rows], torch.cuda.get_device_properties)
    return ProfiledStep(
        step_kernels=rows,
        kernel_facts={name: KernelFacts.model_validate(known) for name, known in facts.items()},
        step_trace=StepTrace.model_validate(step_trace(profile)) if traced else None,
    )


def find_device(device_type: str, devices: int = 1) -> "torch.device":
    """Return the device to train on. Raises DeviceMissing if torch cannot use it: no other device replaces it."""
    import torch

    if device_type == "xla":
        return _xla_device(devices)
    if device_type != "cpu" and not torch.get_device_module(device_type).is_available():
        raise DeviceMissing(
            f"this node trains on devices of type '{device_type}', but torch {torch.__version__} finds none"
        )
    return torch.device(device_type)


def _xla_device(devices: int) -> "torch.device":
    from ablate.kernels.xla import device as xla_device

    try:
        if devices > 1:
            xla_device.use_mesh(devices)
        return xla_device.device()
    except (KernelUnsupported, RuntimeError) as error:  # RuntimeError: the runtime finds no chip
        raise DeviceMissing(f"this node trains on XLA, but no device is usable: {error}") from error


def _write_step(file: TextIO, step: "Step") -> None:
    """Append a step to its file and to the log. The worker judges a non-finite number."""
    file.write(json.dumps(step.model_dump()) + "\n")
    rate = step.tokens / step.seconds if step.seconds else 0.0
    _log(f"step {step.index:4d} {step.phase:<8} loss {step.loss:.4f}  {step.seconds:.3f} s  {rate:,.0f} tokens/s")


def _log_preparation(line: str) -> None:
    _log(f"preparation of the data: {line}")


def _log(line: str) -> None:
    sys.stdout.write(line + "\n")


_MODULE = "step.hlo.pb"


def compile_step(order: TrialOrder, topology: str) -> TrialResult:
    """Trace the training step of `order` and compile it for `topology`.

    The facts of the result show a gate that is not in the graph.

    Raises:
        KernelUnsupported: a gate cannot run.
        CompilerFailed: the compiler's process died, or rejected the step for a reason other than memory.

    """
    from ablate.model.training.traced_step import trace_step

    config = order.model
    traced = trace_step(config)
    sys.stdout.write(f"traced {traced.parameters / 1e6:.1f} M parameters in {traced.seconds:.1f} s\n")
    if order.trace_only:
        return TrialResult.partial(facts=dict(traced.facts), parameters=traced.parameters)
    module = order.paths.folder / _MODULE
    module.write_bytes(traced.module)
    answer = ask_compiler(
        Order(topology=topology, module=str(module), partitions=config.mesh.devices), folder=order.paths.folder
    )
    return _result(answer, traced, _report(answer, traced))


def _report(answer: Answer, traced: "TracedStep") -> CompilationReport:
    graph, memory, cost = answer["graph"], answer.get("memory"), answer.get("cost", {})
    overflow = find_overflow(answer.get("refusal", ""))
    if memory is None and overflow is None:
        raise CompilerFailed(f"the compiler rejected the step: {answer['refusal']}")
    return CompilationReport(
        topology=answer["topology"],
        device_kind=answer["device_kind"],
        chips=answer["partitions"],
        versions=answer["versions"],
        hlo_digest=graph["digest"],
        instructions=graph["instructions"],
        custom_calls=sum(graph["custom_calls"].values()),
        kernels=graph["custom_calls"],
        matmul_flops=graph["matmul_flops"],
        hbm=None if memory is None else _plan(memory),
        overflow=overflow,
        collectives=answer.get("collectives"),
        compiled_calls=answer.get("compiled_calls"),
        compiler_flops=cost.get("flops"),
        compiler_bytes=cost.get("bytes_accessed"),
        trace_s=traced.seconds,
    )


def _plan(memory: dict[str, int]) -> HbmPlan:
    peak = memory["argument_bytes"] + memory["output_bytes"] - memory["alias_bytes"] + memory["temp_bytes"]
    return HbmPlan(**memory, peak_bytes=peak)


def _result(answer: Answer, traced: "TracedStep", report: CompilationReport) -> TrialResult:
    overflow = report.overflow
    peak = report.hbm.peak_bytes if report.hbm else overflow.needed_bytes if overflow else None
    return TrialResult.partial(
        failure_class=None if overflow is None else FailureClass.OOM,
        message=None if overflow is None else _sentence(report),
        compile_s=answer["compile_s"],
        compile_cache_hit=False,
        facts=dict(traced.facts),
        parameters=traced.parameters,
        flops_per_step=traced.flops_per_step,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak,
        compilation=report,
    )


def _sentence(report: CompilationReport) -> str:
    overflow = report.overflow
    assert overflow is not None  # noqa: S101  # callers check it
    where = {"hbm": f"the HBM of one {report.device_kind}", "vmem": "a kernel's on-chip memory (VMEM)"}
    needed, available = (f"{size / 2**30:.2f} GiB" for size in (overflow.needed_bytes, overflow.available_bytes))
    return f"the step does not fit into {where[overflow.memory]}: it needs {needed} of {available}"
