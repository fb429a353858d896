"""What workers ask of a kind of driver, and what they get."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from experiments.records.messages import DeviceInfo
from workers.devices.device_state import DeviceState


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a probe found."""

    devices: tuple[DeviceInfo, ...] = ()
    driver: str | None = None
    """Version of the driver."""
    lacks: tuple[str, ...] = ()
    """Sentences about why there is nothing, where that is surprising."""


class Probe(Protocol):
    """What workers ask of a kind of driver."""

    def find(self) -> Found:
        """Look for devices."""

    def memory_used(self) -> Mapping[int, int]:
        """Return bytes in use by device index, for the proof that a trial has left nothing; empty on the host.

        Raises DeviceUnknown when the driver does not tell.
        """

    def users(self) -> tuple[int, ...]:
        """Return the processes on any of the devices; none on the host. Raises DeviceUnknown, as above."""

    def state(self, index: int) -> DeviceState | None:
        """Return the counters of a device; None where there are none, or nothing can be asked."""
