"""XLA on this machine's processors, unless whoever starts the tests has a TPU. Decided before torch_xla is imported."""

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
