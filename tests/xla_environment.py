"""What tests of lane xla need before torch_xla is imported: import this first; it skips the module without the lane.

XLA runs on this machine's processors unless whoever starts the tests names a TPU, and compiles without optimising the
machine code, which is most of the time of a small test: torch_xla reads and completes the flags when it is imported.
The device is made here, because autograd counts the devices of the process at its first backward pass.
"""

import os

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
pytest.importorskip("torch_xla", reason="lane xla needs its own environment: make tpu, then make test-tpu")

from ablate.kernels.xla import device as xla_device

DEVICE = xla_device.device()
_GIVEN, _ADDED = (os.environ["XLA_FLAGS"].index(flag) for flag in ("optimization_level=0", "xla_cpu_enable_fast_math"))
assert _GIVEN < _ADDED, "torch_xla was imported before it was given its flags"
