"""Limits of the guards: part of the hashed rule, so that nobody widens one after the first sample."""

MAX_SLOWED_SHARE = 0.01
"""Seconds that heat or hardware slowed the device down during a trial, over the seconds of its window."""
MAX_CLOCK_GAP = 0.01
"""Relative difference of the median device clock between arms, unless the difference is there in cycles too."""
MAX_PAUSE_S = 60.0
"""Between the end of a trial and the start of the next one in its block."""
MAX_BACKWARD_S = 1.0
"""By how much a trial may seem to start before the one before it ended: the machine's clock may be set."""


def guard_limits(max_foreign_load: float) -> dict[str, float | int]:
    """Return every limit as it stands in the rule; `max_foreign_load` is a share of the cores' time."""
    return {
        "max_slowed_share": MAX_SLOWED_SHARE,
        "max_clock_gap": MAX_CLOCK_GAP,
        "max_pause_s": MAX_PAUSE_S,
        "max_foreign_load": max_foreign_load,
        "compilations_in_window": 0,
        "reruns_of_a_block": 2,
    }
