"""The interface between workers and drivers: a probe, its answers, and the state of a device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ablate.experiments.records.messages import DeviceInfo
from ablate.experiments.records.receipts import DeviceEvents


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """Counters of one device at one moment; None where the driver reports no value."""

    sw_power_cap_us: int | None = None
    """Microseconds since the driver was loaded, like the next three. `DeviceEvents` explains each."""
    sw_thermal_slowdown_us: int | None = None
    hw_thermal_slowdown_us: int | None = None
    hw_power_brake_us: int | None = None
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    processes: tuple[int, ...] | None = None
    """Processes on any device of this machine."""


def changes(before: DeviceState | None, after: DeviceState | None) -> DeviceEvents | None:
    """Return the events of a device between two states; None without both states."""
    if before is None or after is None:
        return None
    complete = before.processes is not None and after.processes is not None
    return DeviceEvents(
        sw_power_cap=_seconds(before.sw_power_cap_us, after.sw_power_cap_us),
        sw_thermal_slowdown=_seconds(before.sw_thermal_slowdown_us, after.sw_thermal_slowdown_us),
        hw_thermal_slowdown=_seconds(before.hw_thermal_slowdown_us, after.hw_thermal_slowdown_us),
        hw_power_brake=_seconds(before.hw_power_brake_us, after.hw_power_brake_us),
        ecc_uncorrected=_growth(before.ecc_uncorrected, after.ecc_uncorrected),
        foreign_processes=tuple(sorted({*(before.processes or ()), *(after.processes or ())})) if complete else None,
    )


def _seconds(before_us: int | None, after_us: int | None) -> float | None:
    growth_us = _growth(before_us, after_us)
    return None if growth_us is None else round(growth_us / 1e6, 6)


def _growth(before: int | None, after: int | None) -> int | None:
    """Return by how much a counter grew; None when a value is missing, or the counter was reset in between."""
    return None if before is None or after is None or after < before else after - before


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The devices that a probe sees."""

    devices: tuple[DeviceInfo, ...] = ()
    driver: str | None = None
    """Version of the driver."""
    lacks: tuple[str, ...] = ()
    """Sentences that explain a surprising absence of devices."""


class Probe(ABC):
    """Access to one kind of driver. The defaults suit the host and a machine that only compiles."""

    @abstractmethod
    def find(self) -> ProbeResult:
        """Look for devices."""

    def memory_used(self) -> Mapping[int, int]:
        """Return the bytes in use by device index. Raises DeviceUnknown when the driver does not report them."""
        return {}

    def users(self) -> tuple[int, ...]:
        """Return the processes on any of the devices. Raises DeviceUnknown when the driver does not report them."""
        return ()

    def state(self, index: int) -> DeviceState | None:
        """Return the counters of a device, None where the driver has none."""
        return None
