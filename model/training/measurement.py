"""Readings from the device and the host: peak memory and clock.

Peak memory is two numbers: the bytes in tensors, and the bytes that the process (CPU) or the caching allocator (CUDA)
occupied for them. A CPU has no counter for bytes in tensors, and memory that the C allocator keeps hides differences of
a few MiB in the resident set. So on a CPU one more pass runs after the measured window while torch's allocations are
profiled. The result is equal to the byte for every run of a configuration. XLA on a CPU does not report its buffers, so
both numbers are the resident set, which includes the compiler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pynvml
import torch
from torch.profiler import ProfilerActivity, profile

from ablate.kernels.xla import device as xla_device
from ablate.model.errors import MeasurementError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"

MEASURED_DEVICES = ("cpu", "cuda", "xla")
"""Torch device types with a reading. Others are refused."""


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Peak memory since the start of a meter, in bytes."""

    allocated_bytes: int
    """Bytes in tensors."""
    reserved_bytes: int
    """CPU: the resident set. CUDA: bytes that the allocator reserved on the device."""


class PeakMeter:
    """Measures the peak from its construction on. Raises MeasurementError if the system does not report it."""

    def __init__(self, device: torch.device) -> None:
        if device.type not in MEASURED_DEVICES:
            types = ", ".join(MEASURED_DEVICES)
            raise MeasurementError(f"peak memory cannot be measured on devices of type '{device.type}'; known: {types}")
        self._device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        elif device.type != "xla" or xla_device.peak_bytes() is None:
            _reset_peak_rss()

    def read(self, one_pass: Callable[[], None], *, state_bytes: int) -> MemoryPeak:
        """Return the peak so far.

        On a CPU this profiles `one_pass`, a forward and backward pass. `state_bytes` are always in tensors.
        """
        if self._device.type == "cuda":
            return MemoryPeak(
                allocated_bytes=torch.cuda.max_memory_allocated(self._device),
                reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            )
        if self._device.type == "xla":
            peak = xla_device.peak_bytes() or _status_bytes("VmHWM")
            return MemoryPeak(allocated_bytes=peak, reserved_bytes=peak)
        reserved_bytes = _status_bytes("VmHWM")
        return MemoryPeak(allocated_bytes=state_bytes + profiled_peak_bytes(one_pass), reserved_bytes=reserved_bytes)


def profiled_peak_bytes(run: Callable[[], None]) -> int:
    """Run `run` once; return the peak of its CPU bytes that were allocated and not yet freed.

    Raises MeasurementError if torch reports no allocation.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as session:
        run()
    profiler = session.profiler
    events = [] if profiler is None else profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    if not changes:
        raise MeasurementError("peak memory cannot be measured: torch's profiler reported no allocation")
    return max(accumulate((size for _, size in changes), initial=0))


def read_clock_mhz(device: torch.device) -> float | None:
    """Return the current clock of the multiprocessors in MHz; None where NVIDIA's driver does not report it.

    It takes about 0.1 ms, so call it between two measured steps.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return float(torch.cuda.clock_rate(device))
    except (RuntimeError, pynvml.NVMLError):  # torch finds no slice of a GPU; a card does not report its clock
        return None


def _reset_peak_rss() -> None:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS, encoding="ascii")
    except OSError as error:
        raise MeasurementError(
            f"peak memory cannot be measured: writing {_CLEAR_REFS} failed ({error.strerror}); "
            f"it takes Linux with CONFIG_PROC_PAGE_MONITOR and a writable /proc"
        ) from error


def _status_bytes(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise MeasurementError(f"memory cannot be measured: reading {_STATUS} failed ({error.strerror})") from error
    for line in text.splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"memory cannot be measured: {_STATUS} has no field {field}")
