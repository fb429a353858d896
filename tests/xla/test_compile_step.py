"""The compile lane with the real torch_xla and libtpu: what is traced, what the compiler says, what it refuses."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.xla_environment import DEVICE  # isort: skip - it decides about the device before torch_xla is imported


from ablate.experiments.design.kinds.built_in import BuiltInArm
from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.compilation_report import CompilationReport
from ablate.kernels.backends import NODE_CLASSES, Lane
from ablate.kernels.errors import KernelUnsupported
from ablate.kernels.scan_switches import ScanSwitches
from ablate.kernels.xla import compiler as xla_compiler
from ablate.kernels.xla import graph as xla_graph
from ablate.model.config import AttentionConfig, DataConfig, HybridConfig, MambaConfig, TrainConfig
from ablate.model.training import optim_step, traced_step
from ablate.model.training.traced_step import trace_step
from ablate.workers.built_in import training
from ablate.workers.built_in.training import compile_step
from ablate.workers.devices.tpu import ask_compiler
from ablate.workers.paths import WorkPaths
from ablate.workers.trials.result import TrialOrder, TrialResult

COMPILE = NODE_CLASSES["tpu-v6e-compile"]
pytestmark = pytest.mark.skipif(xla_compiler.refusal() is not None, reason=str(xla_compiler.refusal()))


def config_of(pattern: str = "MA", **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": HybridConfig(
            vocab_size=512,
            d_model=64,
            pattern=pattern,
            mamba=MambaConfig(d_state=32, expand=2, headdim=32, mimo_rank=2),
            attention=AttentionConfig(num_heads=2),
            scan=ScanSwitches(lane=Lane.XLA, chunk_size=32),
        ),
        "data": DataConfig(seq_len=128),
        "micro_batch": 2,
        "dtype": "bfloat16",
    }
    return TrainConfig(**{**values, **changes})


def compiled(folder: Path, config: TrainConfig, name: str = "trl_1") -> TrialResult:
    """Run the whole trial in this process, but for what the worker does around it."""
    order = TrialOrder(
        trial_id=name,
        config=BuiltInArm(**vars(config)),
        paths=WorkPaths(home=folder).trial("att_1", name),
        data_dir=folder,
        device_type=COMPILE.device_type,
        environment=COMPILE.environment,
        topology=COMPILE.topologies[config.mesh.devices],
    )
    assert order.topology is not None
    return compile_step(order, order.topology)


def report_of(result: TrialResult) -> CompilationReport:
    assert result.compilation is not None
    return result.compilation


@pytest.mark.slow
def test_a_step_is_compiled_for_a_chip_that_is_not_here_and_again_to_the_byte(tmp_path: Path) -> None:
    results = [compiled(tmp_path, config_of(), f"trl_{number}") for number in range(2)]
    first, again = (report_of(result) for result in results)
    assert first.hbm is not None
    traced = trace_step(config_of())
    assert traced.input_bytes <= first.hbm.argument_bytes < 1.5 * traced.input_bytes  # small tensors are padded
    state = 3 * 4 * traced.parameters
    assert first.hbm.alias_bytes >= state  # parameters and both moments are overwritten in place
    assert first.hbm.code_bytes > 0
    assert (first.topology, first.device_kind, first.chips) == ("v6e:1x1", "TPU v6 lite", 1)
    assert (first.custom_calls, first.kernels) == (0, {})
    assert {"libtpu", "jax", "jaxlib", "torch_xla"} <= set(first.versions)
    if (Path(sys.prefix) / xla_compiler.BESIDE).is_file():  # not the one that jax names when it is imported
        assert xla_compiler.release(first.versions["libtpu"]) >= xla_compiler.OLDEST_WITH_COSTS
        assert (first.compiler_flops or 0) > 0
        assert (first.compiler_bytes or 0) > 0
    assert results[0].compile_s > 0
    same = {"trace_s"}
    assert first.model_dump(exclude=same) == again.model_dump(exclude=same)


@pytest.mark.slow
def test_a_step_that_no_chip_holds_is_an_answer_with_its_bytes(tmp_path: Path) -> None:
    wide = HybridConfig(vocab_size=262_144, d_model=8192, pattern="F", scan=ScanSwitches(lane=Lane.XLA))
    config = config_of(model=wide, micro_batch=1, data=DataConfig(seq_len=8))  # 54 GB of parameters and moments
    result = compiled(tmp_path, config)
    overflow = report_of(result).overflow
    assert overflow is not None
    assert (result.failure_class, overflow.memory) == (FailureClass.OOM, "hbm")
    assert overflow.needed_bytes > overflow.available_bytes > 30 * 2**30
    assert report_of(result).hbm is None
    assert result.message is not None
    assert result.message.startswith("the step does not fit into the HBM of one TPU v6 lite: it needs ")


def kernel_with_scratch(mib: int, module: Path) -> None:
    """Write the module of a kernel that keeps `mib` MiB of the chip's own memory and moves 4 KiB."""
    import jax
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    def copied(x: Any, out: Any, scratch: Any) -> None:
        scratch[:8, :] = x[...]
        out[...] = scratch[:8, :]

    shape = jax.ShapeDtypeStruct((8, 128), "float32")
    kept = tpu.VMEM((mib * 2**20 // 512, 128), "float32")
    call = jax.jit(pallas.pallas_call(copied, out_shape=shape, scratch_shapes=[kept]))
    lowered = call.trace(shape).lower(lowering_platforms=("tpu",))
    module.write_bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


def test_a_kernel_that_exceeds_the_chips_own_memory_is_told_from_hbm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {}
    for mib in (1, 256):
        kernel_with_scratch(mib, tmp_path / "module.pb")
        order = xla_compiler.Order(topology="v6e:1x1", module=str(tmp_path / "module.pb"), donate=False)
        answers[mib] = ask_compiler(order)
    assert answers[1]["compiled_calls"] == 1
    # the step's own kernels would have to be as large, which takes minutes of compiling
    monkeypatch.setattr(training, "ask_compiler", lambda *_, **__: answers[256])
    result = compiled(tmp_path, config_of("F"))
    overflow = report_of(result).overflow
    assert overflow is not None
    assert (result.failure_class, overflow.memory) == (FailureClass.OOM, "vmem")
    assert overflow.needed_bytes >= 256 * 2**20 > overflow.available_bytes
    assert str(result.message).startswith("the step does not fit into a kernel's on-chip memory (VMEM): it needs 0.25 ")


@pytest.mark.parametrize("pattern", ["A", "AF", "FAAF"])
def test_without_loops_the_graph_has_the_products_that_the_model_counts(pattern: str) -> None:
    traced = trace_step(config_of(pattern))
    assert xla_graph.read_graph(traced.module).matmul_flops == traced.flops_per_step


@pytest.mark.parametrize("seed", range(5))
def test_products_in_a_loop_of_jax_are_counted_with_every_trip(seed: int) -> None:
    import jax

    draw = random.Random(seed)  # noqa: S311
    size, trips, inner = draw.randint(1, 64), draw.randint(2, 40), draw.randint(2, 10)

    def nested(x: Any) -> Any:
        once = jax.lax.fori_loop(0, trips, lambda _i, y: jax.lax.fori_loop(0, inner, lambda _j, z: z @ x, y), x)
        return once @ x

    lowered = jax.jit(nested).lower(jax.ShapeDtypeStruct((size, size), "float32"))
    graph = xla_graph.read_graph(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    assert graph.matmul_flops == 2 * size**3 * (trips * inner + 1)


ALONE = """
from tests.xla.test_compile_step import config_of
from ablate.kernels.xla import device as xla_device
from ablate.kernels.xla import graph as xla_graph
from ablate.model.training.traced_step import trace_step

graph = xla_graph.read_graph(trace_step(config_of()).module)
print(graph.digest, xla_device.compilations())
"""


def test_tracing_computes_nothing_and_gives_every_process_the_same_module(tmp_path: Path) -> None:
    environment = {**os.environ, **COMPILE.environment, "PYTHONPATH": str(Path.cwd())}
    assert DEVICE.type == "xla"
    ended = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    digest, compilations = ended.stdout.strip().splitlines()[-1].split()
    assert digest == xla_graph.read_graph(trace_step(config_of()).module).digest  # after whatever ran here
    assert compilations == "0"


@pytest.mark.parametrize(
    ("work", "operation"),
    [
        (Tensor.item, "aten._local_scalar_dense.default"),
        (Tensor.tolist, "aten._to_copy.default"),
        (Tensor.nonzero, "aten.nonzero.default"),
        (torch.special.bessel_j0, "aten.special_bessel_j0.default"),
    ],
    ids=["item", "tolist", "nonzero", "bessel_j0"],
)
def test_a_step_with_work_on_the_host_is_refused(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Tensor], object], operation: str
) -> None:
    def split(loss_now: Tensor, *rest: Any) -> Tensor:
        work(loss_now.detach())
        return optim_step.update(loss_now, *rest)

    monkeypatch.setattr(traced_step, "update", split)
    with pytest.raises(KernelUnsupported, match=f"operation {operation} runs on the host, so the step would not be"):
        trace_step(config_of("F"))


def test_the_rows_of_a_step_change_the_module() -> None:
    graphs = [xla_graph.read_graph(trace_step(config_of(micro_batch=rows)).module) for rows in (1, 2, 4)]
    assert len({graph.digest for graph in graphs}) == 3
    flops = [graph.matmul_flops or 0 for graph in graphs]
    assert flops[1] - flops[0] == (flops[2] - flops[1]) / 2
