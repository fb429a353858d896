"""Clocks and memory of a command's GPUs, sampled while it runs, and the energy of its window.

The samples come from the driver's library, which answers in well under a millisecond and makes no context on a GPU.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pynvml

from ablate.experiments.system.processes import descendants_of
from ablate.workers.devices.nvidia_probe import NoDriver, answer, open_gpus
from ablate.workers.errors import DeviceUnknown

CLOCK_EVERY_S = 0.05
MEMORY_EVERY_S = 0.2
ENERGY_EVERY_S = 10.0
"""A counter of a processor begins anew after some minutes at the earliest."""
GPU_WINDOW_S = 2.0
"""Shortest window whose energy GPUs know within 5 %: an H200 renews its counter every 0.1 s."""
POWER_CAP = Path("/sys/class/powercap")
GPUS, PACKAGES = "GPUs", "processor packages"


class WindowEnergy:
    """Energy of a window, from counters that only grow, or begin anew at a limit each."""

    def __init__(
        self,
        of: str = "",
        read: Callable[[], Sequence[int | None]] = tuple,
        *,
        limits: Sequence[int] = (),
        per_joule: float = 1.0,
        shortest_s: float = 0.0,
    ) -> None:
        """`read` returns the counters, none of them where there are none. Shorter windows get no number."""
        self.of = of
        self.joules: float | None = None
        """None before the end of a window, after a short one, and where a counter gave no answer or fell."""
        self._read, self._limits, self._per_joule = read, limits, per_joule
        self._before: Sequence[int] | None = None
        """None outside of a window, and after an answer was missing."""
        self._grown, self._read_at = 0, 0.0
        self._shortest_s, self._began_at = shortest_s, 0.0

    def begin(self) -> None:
        """Begin a window."""
        self.joules, self._grown = None, 0
        self._before = self._answer()
        self._began_at = self._read_at

    def sample(self) -> None:
        """Read the counters, unless they were read a moment ago."""
        if self._before is not None and time.monotonic() - self._read_at >= ENERGY_EVERY_S:
            self._add()

    def end(self) -> None:
        """End the window."""
        self._add()
        if self._before is not None and self._read_at - self._began_at >= self._shortest_s:
            self.joules, self._before = self._grown / self._per_joule, None

    def _answer(self) -> Sequence[int] | None:
        self._read_at = time.monotonic()
        counters = self._read()
        known = [one for one in counters if one is not None]
        return known if known and len(known) == len(counters) else None

    def _add(self) -> None:
        before, now = self._before, None if self._before is None else self._answer()
        self._before = now
        if before is None or now is None:
            return
        for place, (earlier, later) in enumerate(zip(before, now, strict=True)):
            if later < earlier and not self._limits:
                self._before = None
                return
            self._grown += later - earlier + (self._limits[place] if later < earlier else 0)


def package_energy(folder: Path) -> WindowEnergy:
    """Return the counters of all processor packages (RAPL), none of them if this user may not read one."""
    zones = sorted(zone for zone in folder.glob("*-rapl:*") if _text(zone / "name").startswith("package"))
    limits = [_number(zone / "max_energy_range_uj") for zone in zones]
    whole = [limit for limit in limits if limit]
    if not zones or len(whole) < len(zones):
        return WindowEnergy()
    read = [zone / "energy_uj" for zone in zones]
    return WindowEnergy(PACKAGES, lambda: [_number(path) for path in read], limits=whole, per_joule=1e6)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else None


class DeviceSamples:
    """Samples of the first GPUs of this worker; none without GPUs, and no clocks of cards without one."""

    def __init__(self, devices: int, *, on_host: bool = False) -> None:
        """Look for `devices` GPUs; `on_host` takes the energy of the processors.

        Raises DeviceUnknown if the driver does not know a GPU.
        """
        self._handles = _handles(devices) if devices else []
        gpus = WindowEnergy(GPUS, self._energy_mj, per_joule=1e3, shortest_s=GPU_WINDOW_S)
        self.energy = package_energy(POWER_CAP) if on_host else gpus
        self._sampled_at = 0.0
        self.clocks: list[tuple[float, float]] = []
        """Moments of the monotonic clock, and the clock of the slowest GPU in MHz."""
        self._memory_at = 0.0
        self._own: dict[int, bool] = {}
        """Whether a process on a GPU belongs to the trial."""
        self.peak_bytes: int | None = None
        """Most memory that the trial's processes had on one GPU, at any sample; None if none was seen on a GPU."""

    def sample(self) -> None:
        """Read clocks and memory, unless there are samples of this moment."""
        self.energy.sample()
        now = time.monotonic()
        if not self._handles or now - self._sampled_at < CLOCK_EVERY_S:
            return
        self._sampled_at = now
        clocks = [answer("ClockInfo", handle, pynvml.NVML_CLOCK_SM) for handle in self._handles]
        if None not in clocks:
            self.clocks.append((now, float(min(clocks))))
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at = now
            rows = [answer("ComputeRunningProcesses", handle) or () for handle in self._handles]
            self._take([{row.pid: row.usedGpuMemory for row in one} for one in rows])

    def clock_at(self, moment: float) -> float | None:
        """Return the clock of the slowest GPU in MHz in the sample nearest to a moment of the monotonic clock."""
        return min(self.clocks, key=lambda sample: abs(sample[0] - moment))[1] if self.clocks else None

    def _energy_mj(self) -> list[int | None]:
        return [answer("TotalEnergyConsumption", handle) for handle in self._handles]

    def _take(self, tables: Sequence[Mapping[int, int | None]]) -> None:
        """Keep the greatest sum of the trial's processes on one GPU. A process without a number is left out."""
        unknown = {pid for table in tables for pid in table} - self._own.keys()
        if unknown:
            family = set(descendants_of([os.getpid()]))
            self._own |= {pid: pid in family for pid in unknown}
        for table in tables:
            used = [size for pid, size in table.items() if self._own[pid] and size is not None]
            if used:
                self.peak_bytes = max(self.peak_bytes or 0, sum(used))


def _handles(devices: int) -> list[Any]:
    """Return the driver's handles of the first `devices` GPUs of this worker; none without a driver of NVIDIA."""
    try:
        with open_gpus() as gpus:
            pynvml.nvmlInit()  # once more: handles last while the library is open
            handles = [gpu.handle for gpu in gpus[:devices]]
    except NoDriver:
        return []
    if len(handles) < devices:
        raise DeviceUnknown(f"the trial needs {devices} GPUs; this worker has {len(handles)}")
    return handles
