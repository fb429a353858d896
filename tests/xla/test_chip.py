"""What only a TPU can prove. Without one every test here is skipped, "no TPU", and none counts as passed."""

import os
import subprocess
import sys

import pytest

from ablate.kernels.backends import NODE_CLASSES
from ablate.workers.devices.node_health import ReleaseProof
from ablate.workers.devices.tpu import TpuProbe

PROBE = TpuProbe()
TPU = NODE_CLASSES["tpu-v6e"]
pytestmark = [pytest.mark.tpu, pytest.mark.skipif(not PROBE.find().devices, reason="no TPU")]

STEP = """
from ablate.kernels.xla import device as xla_device
import torch

held = torch.ones(1024, 1024, 256, device=xla_device.device())
xla_device.step_boundary()
print("held", float(held[0, 0, 0].cpu()), xla_device.peak_bytes(), flush=True)
input()
"""


def _started(program: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, **TPU.environment}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_chip_is_held_by_one_process_tells_its_peak_and_is_free_when_that_ends() -> None:
    proof = ReleaseProof(PROBE, PROBE.memory_used())
    process = _started(STEP)
    assert process.stdout is not None
    word, value, peak = process.stdout.readline().split()
    assert (word, float(value)) == ("held", 1.0)
    assert int(peak) >= 2**30
    state = PROBE.state(0)
    assert state is not None
    assert state.processes == (process.pid,)
    second = _started("from ablate.kernels.xla import device as xla_device; xla_device.device()")
    second.communicate()
    assert second.returncode != 0
    process.communicate("\n")
    assert proof.problem() is None


def test_the_module_that_a_chip_compiles_is_the_one_that_was_traced_without_it() -> None:
    program = """
from tests.xla.test_compile_step import config_of
from ablate.kernels.xla import graph as xla_graph
from ablate.model.training.traced_step import trace_step

print(xla_graph.read_graph(trace_step(config_of()).module).digest)
"""
    said = []
    for device in ("CPU", "TPU"):
        environment = {**os.environ, "PJRT_DEVICE": device, "JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        said.append(ended.stdout.splitlines()[-1])
    assert said[0] == said[1]
