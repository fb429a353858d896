"""A trial on a node class that executes nothing: trace the training step, compile it, report the memory it needs.

This module imports torch only inside functions, as `ablate.workers.processes.trial` does.
"""

import sys
from typing import TYPE_CHECKING

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.compilation_report import CompilationReport, HbmPlan
from ablate.kernels.xla.compiler import Order
from ablate.workers.devices.xla_compilation import Answer, ask_compiler, find_overflow
from ablate.workers.errors import CompilerFailed
from ablate.workers.trials.result import TrialOrder, TrialResult

if TYPE_CHECKING:
    from ablate.model.training.traced_step import TracedStep

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
