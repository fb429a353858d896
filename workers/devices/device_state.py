"""The counters of a device at one moment, and what happened to it between two."""

from dataclasses import dataclass

from experiments.records.receipts import DeviceEvents


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """Counters of one device at one moment; None is what the driver does not tell."""

    sw_power_cap_us: int | None = None
    """Microseconds since the driver was loaded, like the next three; what each means: `DeviceEvents`."""
    sw_thermal_slowdown_us: int | None = None
    hw_thermal_slowdown_us: int | None = None
    hw_power_brake_us: int | None = None
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors since the driver was loaded."""
    processes: tuple[int, ...] | None = None
    """Processes on any device of this machine."""


def changes(before: DeviceState | None, after: DeviceState | None) -> DeviceEvents | None:
    """Return what happened to a device between two looks at it, or None when nothing could be asked."""
    if before is None or after is None:
        return None
    known = before.processes is not None and after.processes is not None
    return DeviceEvents(
        sw_power_cap=_seconds(before.sw_power_cap_us, after.sw_power_cap_us),
        sw_thermal_slowdown=_seconds(before.sw_thermal_slowdown_us, after.sw_thermal_slowdown_us),
        hw_thermal_slowdown=_seconds(before.hw_thermal_slowdown_us, after.hw_thermal_slowdown_us),
        hw_power_brake=_seconds(before.hw_power_brake_us, after.hw_power_brake_us),
        ecc_uncorrected=_more(before.ecc_uncorrected, after.ecc_uncorrected),
        foreign_processes=tuple(sorted({*(before.processes or ()), *(after.processes or ())})) if known else None,
    )


def _seconds(before_us: int | None, after_us: int | None) -> float | None:
    more = _more(before_us, after_us)
    return None if more is None else round(more / 1e6, 6)


def _more(before: int | None, after: int | None) -> int | None:
    """Return by how much a counter grew; None when it was not told, or was reset in between."""
    return None if before is None or after is None or after < before else after - before
