"""What a receipt says about the devices of its trial and about other processes."""

from typing import Annotated

from pydantic import Field

from experiments.documents import Frozen
from model.measurements import OmitNone


class DeviceEvents(Frozen):
    """Events of a trial's device from just before to just after the trial, as the driver reports them."""

    sw_power_cap: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed the device down to its power limit; normal under full load."""
    sw_thermal_slowdown: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed the device down because it was hot."""
    hw_thermal_slowdown: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the hardware slowed itself down because it was hot."""
    hw_power_brake: OmitNone[Annotated[float, Field(ge=0)]] = None
    """Seconds that the power supply made the hardware slow down."""
    ecc_uncorrected: OmitNone[Annotated[int, Field(ge=0)]] = None
    """New uncorrected memory errors."""
    foreign_processes: OmitNone[tuple[int, ...]] = None
    """Processes of others on any device of the machine, before or after the trial."""


class HeldDevice(Frozen):
    """One of several devices of a trial."""

    name: str
    serial: OmitNone[str] = None
    events: OmitNone[DeviceEvents] = None
    """Of this device alone."""


class ForeignProcess(Frozen):
    """A process outside the trial that used a processor meanwhile."""

    pid: int
    name: str
    cpu_s: float
    """Processor time during the whole trial, in seconds."""
