"""What happened to the device around a trial, as its driver told before and after: workers write it, guards read it."""

from collections.abc import Callable
from typing import Annotated, TypeAlias, TypeVar

from pydantic import Field

from experiments.documents import Frozen

_T = TypeVar("_T")

Told: TypeAlias = Annotated[_T | None, Field(exclude_if=lambda value: value is None)]
"""None where the driver did not tell, which is not 0; JSON leaves it out, so that the digest knows the difference."""


class DeviceEvents(Frozen):
    """Changes from just before a trial to just after it, on its device."""

    sw_power_cap: Told[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed the device down to stay within its power limit; normal under full load."""
    sw_thermal_slowdown: Told[Annotated[float, Field(ge=0)]] = None
    """Seconds that the driver slowed it down because it was hot."""
    hw_thermal_slowdown: Told[Annotated[float, Field(ge=0)]] = None
    """Seconds that the hardware slowed itself down because it was hot."""
    hw_power_brake: Told[Annotated[float, Field(ge=0)]] = None
    """Seconds that the machine's power supply asked the hardware to slow down."""
    ecc_uncorrected: Told[Annotated[int, Field(ge=0)]] = None
    """New uncorrected memory errors."""
    foreign_processes: Told[tuple[int, ...]] = None
    """Processes on any device of the machine that were there before or after the trial: its own are not."""


FATAL_EVENTS: dict[str, Callable[[DeviceEvents], object]] = {
    "hardware thermal slow-down": lambda events: events.hw_thermal_slowdown,
    "software thermal slow-down": lambda events: events.sw_thermal_slowdown,
    "hardware power brake": lambda events: events.hw_power_brake,
    "uncorrected ECC error": lambda events: events.ecc_uncorrected,
    "foreign process on the device": lambda events: events.foreign_processes,
}
"""What makes a trial invalid when it happened at all; a software power cap is recorded, not fatal."""
