"""Peak memory of a trial: the resident set of this process on a CPU, the caching allocator on a CUDA device."""

from dataclasses import dataclass
from pathlib import Path

import torch

from model.errors import MeasurementError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Highest memory since a meter was started, in bytes."""

    allocated_bytes: int
    """CPU: growth of the resident set over the start. CUDA: bytes in tensors."""
    reserved_bytes: int
    """CPU: the resident set itself. CUDA: bytes that the allocator holds on the device."""


class PeakMeter:
    """Measures the peak from its construction on; raises MeasurementError where the system does not tell."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_peak_rss()
            self._start_bytes = _status_bytes("VmRSS")

    def read(self) -> Peak:
        """Return the peak up to now."""
        if self._device.type == "cuda":
            return Peak(
                allocated_bytes=torch.cuda.max_memory_allocated(self._device),
                reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            )
        peak_bytes = _status_bytes("VmHWM")
        return Peak(allocated_bytes=max(0, peak_bytes - self._start_bytes), reserved_bytes=peak_bytes)


def _reset_peak_rss() -> None:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS, encoding="ascii")
    except OSError as error:
        raise MeasurementError(
            f"peak memory cannot be measured: writing {_CLEAR_REFS} failed ({error.strerror}); "
            f"it takes Linux with CONFIG_PROC_PAGE_MONITOR and a writable /proc"
        ) from error


def _status_bytes(field: str) -> int:
    """Return a field of this process's status in bytes."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise MeasurementError(f"memory cannot be measured: reading {_STATUS} failed ({error.strerror})") from error
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"memory cannot be measured: {_STATUS} has no field {field}")
