"""Which configurations generate code: torch.compile, the scan in lanes cuda and peer, flex attention. Torch-free.

XLA compiles whatever graph a step turns out to be when it ends, so there is no pass before step 0 for it: the first
steps compile, and none after them.
"""

from kernels.backends import GENERATED_LANES
from model.config import TrainConfig


def generates_code(config: TrainConfig) -> bool:
    """Say whether a pass before step 0 compiles something for `config`."""
    return uses_inductor(config) or ("M" in config.model.pattern and config.model.scan.lane in GENERATED_LANES)


def uses_inductor(config: TrainConfig) -> bool:
    """Say whether torch's compiler is among what compiles it."""
    flex = "A" in config.model.pattern and config.model.attention.backend == "flex"
    return config.compile or flex
