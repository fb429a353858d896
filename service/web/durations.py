"""How pages write durations and ages: as people say them, in one unit."""

from datetime import UTC, datetime

_UNITS = ((172_800, 86_400, "days"), (5_400, 3600, "h"), (100, 60, "min"))
"""From so many seconds on: seconds of the unit, its name."""


def duration(seconds: float) -> str:
    """Write seconds in the largest unit of which there are some, for example "12 min"."""
    for least, unit_s, name in _UNITS:
        if seconds >= least:
            return f"{seconds / unit_s:.0f}\N{NO-BREAK SPACE}{name}"
    return f"{max(0.0, seconds):.0f}\N{NO-BREAK SPACE}s"


def age_s(rfc3339: str) -> float:
    """Return the seconds since an RFC 3339 moment."""
    return (datetime.now(UTC) - datetime.fromisoformat(rfc3339)).total_seconds()
