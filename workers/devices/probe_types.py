"""The interface between workers and drivers: a probe, its answers, and the state of a device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ablate.experiments.records.messages import DeviceInfo


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
