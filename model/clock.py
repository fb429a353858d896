"""The device's clock while it trains, where the driver tells it: NVIDIA GPUs with the package nvidia-ml-py."""

from importlib.util import find_spec

import torch

_CAN_ASK = find_spec("pynvml") is not None


def read_clock_mhz(device: torch.device) -> float | None:
    """Return the clock of the multiprocessors in MHz now; None on a CPU and where nothing can be asked.

    Costs about 0.1 ms, so it is asked between two measured steps.
    """
    if device.type != "cuda" or not _CAN_ASK:
        return None
    return float(torch.cuda.clock_rate(device))
