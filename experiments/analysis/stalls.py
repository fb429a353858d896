"""Stalls: whether slow single steps, rather than all steps, make the difference between two arms.

The total of a window counts them and the median does not. Neither is dropped: where they disagree, no word is said.
"""

import numpy as np

from experiments.analysis.comparing import Sample, Window
from experiments.analysis.statistics import count_flip_p, fit, percent

LEVEL = 0.05
"""Of both tests: chance alone must not take words from noisy nodes."""


def stalls_differ(sample: Sample, margin_pct: float) -> str | None:
    """Return how the arms' stalls differ, with the numbers, or None.

    They do where effects by total and by median are further apart than the margin, beyond what block noise explains
    (t test over blocks), or where one arm has more outlier steps (sign-flip test over blocks).
    """
    window = sample.window
    if window is None:
        return None
    return _estimates_differ(sample, window, margin_pct) or _counts_differ(window)


def _estimates_differ(sample: Sample, window: Window, margin_pct: float) -> str | None:
    by_total, by_median = (fit(d, sample.places).mean for d in (sample.differences, window.by_median))
    gap = fit(np.subtract(sample.differences, window.by_median), sample.places)
    if abs(percent(float(gap.mean))) <= margin_pct or float(gap.p_different()) > LEVEL:
        return None
    totals = f"{percent(float(by_total)):+.2f} % by total and {percent(float(by_median)):+.2f} % by median"
    return f"{totals}, further apart than the margin of {margin_pct:g} %"


def _counts_differ(window: Window) -> str | None:
    more = [variant - baseline for baseline, variant in window.outliers]
    p = count_flip_p(more)
    if p > LEVEL:
        return None
    own, other = sum(variant for _, variant in window.outliers), sum(baseline for baseline, _ in window.outliers)
    return f"{own} outlier steps against the baseline's {other} (sign-flip p {p:.2g})"
