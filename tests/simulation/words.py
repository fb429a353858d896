"""The judge's verdicts for whole arrays of ablations, by its own fits, corrections and tests, without receipts.

`test_words.py` compares them with the judge, number by number, on receipts with the same times.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from ablate.experiments.analysis.influences import LEVEL
from ablate.experiments.analysis.sample_checks import (
    FAR_NOISIER,
    NOISE_LEVEL,
    SPREAD_LEVEL,
    STALL_LEVEL,
    is_clear,
    may_have_a_tail,
    p_equal_spread,
)
from ablate.experiments.analysis.statistics import (
    Array,
    Fit,
    count_flip_p,
    fit,
    holm,
    likelihood,
    log_ratio,
    strongest,
    widening,
)
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS
from ablate.experiments.design.power import ONE_LOOK, Look
from ablate.experiments.records.receipts import MAD_TO_SIGMA, MIN_SPREAD, OUTLIER_MADS
from tests.simulation.noise import Draw

Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Summaries of the windows of a draw; arm 0 is the baseline. d and places are (repetitions, variants, blocks)."""

    d: Array
    """Change of throughput, by total."""
    sums: Array
    """Sum of both arms' ln(throughput)."""
    by_median: Array
    places: Array
    more_outliers: NDArray[np.int64]
    """Outlier steps of the variant minus those of the baseline."""
    uneven: Flags
    """Whether the arms' spreads differ, and the noisier one may have a tail to one side."""
    rerun: Flags
    """(repetitions, variants)."""
    lost: NDArray[np.int_]
    """(repetitions, variants): trials of the variant or the baseline that were cut short."""
    widened: Array
    """(repetitions, 1): factor by which dependence widens the tests; 1 without A/A blocks."""
    in_aa: Array | None
    """(repetitions, strengths): what each ablation's A/A blocks say on dependence."""
    after: Array
    """Like d: 1 where the variant's trial follows one of the variant, -1 where the baseline's does, 0 otherwise."""
    aa_sd: Array
    """(repetitions,): standard deviation of d in the A/A blocks; infinite without any."""
    aa_blocks: int = ADMITTING_BLOCKS


@dataclass(frozen=True, kw_only=True)
class Words:
    """The verdicts of every variant: (repetitions, variants)."""

    better: Flags
    worse: Flags
    above: Flags
    """Proved to be above zero, with an estimate beyond the margin: what the old rule called better."""
    same: Flags
    stalls: Flags
    """Whether the verdict is `inconclusive: stalls differ`."""
    withheld: Flags
    """Whether only stalls, spreads, carry-over, noise or reruns prevent a verdict."""
    low: Array
    high: Array
    """Simultaneous interval, in natural log units."""
    estimate: Array

    @property
    def changed(self) -> Flags:
        """Whether the verdict is a difference."""
        return self.better | self.worse


def windows_of(draw: Draw) -> Windows:
    """Summarise every trial like its receipt."""
    total, middle = draw.seconds.sum(axis=-1), np.median(draw.seconds, axis=-1)
    spread = np.median(np.abs(draw.seconds - middle[..., None]), axis=-1)
    cutoff = middle + OUTLIER_MADS * np.maximum(MAD_TO_SIGMA * spread, MIN_SPREAD * middle)
    outliers = np.count_nonzero(draw.seconds > cutoff[..., None], axis=-1)
    d, sums = _paired(-np.log(total)), np.swapaxes(-np.log(total[:, :, 1:]) - np.log(total[:, :, :1]), 1, 2)
    places, in_aa = _paired(draw.places), None if draw.aa is None else likelihood(draw.aa, draw.aa_places)
    whole = Windows(
        d=d,
        sums=sums,
        uneven=_uneven(d, sums),
        by_median=_paired(-np.log(middle)),
        places=places,
        more_outliers=_paired(outliers.astype(np.float64)).astype(np.int64),
        rerun=draw.rerun[:, 1:] | draw.rerun[:, :1],
        lost=np.zeros(d.shape[:2], dtype=np.int_) if draw.cut is None else draw.cut[:, 1:] + draw.cut[:, :1],
        widened=widened_by(in_aa, *(values[:, : -1 if draw.control else None] for values in (d, places))),
        in_aa=in_aa,
        after=_after(draw.places),
        aa_sd=np.full(len(d), np.inf) if draw.aa is None else draw.aa.std(axis=1, ddof=1),
        aa_blocks=ADMITTING_BLOCKS if draw.aa is None else draw.aa.shape[1],
    )
    return _without_control(whole) if draw.control else whole


def _without_control(windows: Windows) -> Windows:
    """Leave out the last arm, which is neither judged nor corrected for."""
    of_variants = ("d", "sums", "by_median", "places", "more_outliers", "uneven", "rerun", "lost", "after")
    return replace(windows, **{name: getattr(windows, name)[:, :-1] for name in of_variants})


def _uneven(d: Array, sums: Array) -> Flags:
    return np.asarray((p_equal_spread(d, sums) <= SPREAD_LEVEL) & may_have_a_tail(d, sums), dtype=np.bool_)


def _after(places: Array) -> Array:
    """Return which trials follow one of each variant, in blocks without pauses."""
    repetitions, _, arms = places.shape
    in_time = np.argsort(places, axis=-1).reshape(repetitions, -1)
    before = np.concatenate([np.full((repetitions, 1), -1), in_time[:, :-1]], axis=1).reshape(places.shape)
    by_arm = np.take_along_axis(before, places.astype(np.intp), axis=-1)
    variants = np.arange(1, arms)
    after = (by_arm[:, :, 1:] == variants).astype(np.float64) - (by_arm[:, :, :1] == variants)
    return np.swapaxes(after, 1, 2)


def widened_by(in_aa: Array | None, d: Array, places: Array) -> Array:
    """Return the factor of each ablation, for d and places (repetitions, variants, blocks), as the judge takes it."""
    if in_aa is None:
        return np.ones((len(d), 1))
    strengths = strongest(in_aa, likelihood(d, 1.0, places).mean(axis=1))
    return np.array([[widening(float(one), d.shape[-1])] for one in strengths])


def _paired(values: Array) -> Array:
    """Return variant minus baseline, blocks last."""
    return np.swapaxes(values[:, :, 1:] - values[:, :, :1], 1, 2)


def first_blocks(windows: Windows, blocks: int) -> Windows:
    """Return the summaries of the first `blocks` blocks."""
    d, sums, places = (values[..., :blocks] for values in (windows.d, windows.sums, windows.places))
    return Windows(
        d=d,
        sums=sums,
        uneven=_uneven(d, sums),
        by_median=windows.by_median[..., :blocks],
        places=places,
        more_outliers=windows.more_outliers[..., :blocks],
        rerun=windows.rerun,
        lost=windows.lost,
        widened=widened_by(windows.in_aa, d, places),
        in_aa=windows.in_aa,
        after=windows.after[..., :blocks],
        aa_sd=windows.aa_sd,
        aa_blocks=windows.aa_blocks,
    )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What differs between the present rule and the old one."""

    stalls_veto: bool = False
    """Whether stalls withheld every word, also one that the medians give."""
    by_estimate: bool = False
    """Whether a proved difference is better or worse as soon as the estimate is beyond the margin."""
    forgets_lost: bool = False
    """Whether trials that were cut short never take the word same."""


NOW = Rule()
OLD = Rule(stalls_veto=True, by_estimate=True, forgets_lost=True)
"""The rule of verdicts until November 2026, beside which the tables show the present one."""


def words_of(
    windows: Windows,
    *,
    alpha: ArrayLike,
    margin_pct: float,
    effects: Array,
    look: Look = ONE_LOOK,
    rule: Rule = NOW,
) -> Words:
    """Judge every variant at `alpha`, its throughput changed by `effects` (..., variants) in natural log units."""
    alpha = np.asarray(alpha, dtype=np.float64)
    plain = fit(windows.d + effects[..., None], windows.places)
    fitted = plain.widened(windows.widened)
    mean, family = fitted.mean, fitted.mean.shape[-1]
    low, high = log_ratio(-margin_pct), log_ratio(margin_pct)
    different = holm(look.overall(fitted.p_different()), family) <= alpha
    level = look.level(alpha / family)
    ends = fitted.interval(level)
    proved = different & ((mean < low) | (mean > high))
    changed = proved if rule.by_estimate else (ends[0] > high) | (ends[1] < low)
    same = ~changed & (holm(look.overall(fitted.p_same(low, high)), family) <= alpha)
    stalls = stalls_of(windows, margin_pct)
    if not rule.stalls_veto:
        stalls &= ~_said_by_median(windows, effects, mean, level, (low, high), changed, same)
    spreads = windows.uneven & ~is_clear(windows.d, windows.sums, mean)
    carried = _carried_over(windows, effects, level, (low, high), same)
    free = ~stalls & ~spreads & ~windows.rerun & ~_far_noisier(plain, windows) & ~carried
    if not rule.forgets_lost:
        free &= ~(same & _not_same_with_lost(windows, effects, level, (low, high)))
    return Words(
        better=changed & (mean > 0) & free,
        worse=changed & (mean < 0) & free,
        above=(changed | proved) & (mean > 0) & free,
        same=same & free,
        stalls=stalls,
        withheld=(changed | same | (different & (not rule.by_estimate))) & ~free,
        low=np.where(different & (mean > 0), np.maximum(ends[0], 0), ends[0]),
        high=np.where(different & (mean < 0), np.minimum(ends[1], 0), ends[1]),
        estimate=mean,
    )


def _carried_over(windows: Windows, effects: Array, level: Array, margin: tuple[float, float], same: Flags) -> Flags:
    """Return whether trials act on the next one and the word, sameness where `same`, does not hold beside that."""
    d = windows.d + effects[..., None]
    columns = np.stack([np.ones_like(d), np.broadcast_to(windows.places, d.shape), windows.after], axis=-1)
    whole = np.linalg.matrix_rank(columns) == 3
    squares = np.swapaxes(columns, -1, -2) @ columns
    inverse = np.linalg.inv(np.where(whole[..., None, None], squares, np.eye(3)))
    values = (inverse @ (np.swapaxes(columns, -1, -2) @ d[..., None]))[..., 0]
    freedom = d.shape[-1] - 3
    sd = np.sqrt(np.sum((d - (columns @ values[..., None])[..., 0]) ** 2, axis=-1) / freedom)
    errors = sd[..., None] * np.sqrt(np.diagonal(inverse, axis1=-2, axis2=-1))
    acts = 2 * special.stdtr(freedom, -np.abs(values[..., 2] / errors[..., 2])) <= LEVEL
    mean, error = values[..., 0], errors[..., 0]
    reach = special.stdtrit(freedom, 1 - level / 2) * error
    changed = (mean + reach < margin[0]) | (mean - reach > margin[1])
    alike = special.stdtr(freedom, -np.minimum(mean - margin[0], margin[1] - mean) / error) <= level
    return np.asarray(whole & acts & ~np.where(same, alike, changed), dtype=np.bool_)


def _not_same_with_lost(windows: Windows, effects: Array, level: Array, margin: tuple[float, float]) -> Flags:
    """Return whether sameness is not proved if the lost trials were twice as slow as the slowest."""
    d, factor = windows.d + effects[..., None], windows.widened
    flags = np.zeros(windows.lost.shape, dtype=np.bool_)
    for at in zip(*np.nonzero(windows.lost), strict=True):
        more = np.zeros(windows.lost[at])
        fits = [
            fit([*d[at], *(more + one)], [*windows.places[at], *more]).widened(factor[at[0], 0])
            for one in (d[at].min() - np.log(2), d[at].max() + np.log(2))
        ]
        flags[at] = max(float(one.p_same(*margin)) for one in fits) > level
    return flags


def _far_noisier(fitted: Fit, windows: Windows) -> Flags:
    """Return whether d scatters so much more than the A/A blocks that they say nothing on its noise."""
    ratio = fitted.sd / windows.aa_sd[:, None]
    p = special.fdtrc(fitted.blocks - 2, windows.aa_blocks - 2, ratio**2)
    return np.asarray((ratio >= FAR_NOISIER) & (p <= NOISE_LEVEL), dtype=np.bool_)


def _said_by_median(
    windows: Windows,
    effects: Array,
    mean: Array,
    level: Array,
    margin: tuple[float, float],
    changed: Flags,
    same: Flags,
) -> Flags:
    """Return whether the medians of the windows give the same word as the totals."""
    fitted = fit(windows.by_median + effects[..., None], windows.places).widened(windows.widened)
    ends = fitted.interval(level)
    differs = (ends[0] > margin[1]) | (ends[1] < margin[0])
    alike = fitted.p_same(*margin) <= level
    by_change = differs & (fitted.mean * mean >= 0)
    return np.asarray(np.where(changed, by_change, np.where(same, alike, ~differs & ~alike)), dtype=np.bool_)


def stalls_of(windows: Windows, margin_pct: float) -> Flags:
    """Return whether the arms' stalls differ; an effect on all steps moves total and median alike."""
    gap = fit(windows.d - windows.by_median, windows.places)
    apart = (np.abs(100 * np.expm1(gap.mean)) > margin_pct) & (gap.p_different() <= STALL_LEVEL)
    counts = np.apply_along_axis(count_flip_p, -1, windows.more_outliers) <= STALL_LEVEL
    return np.asarray(apart | counts, dtype=np.bool_)
