"""Comparison of variants with the baseline on one metric: from block differences to corrected numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from ablate.experiments.analysis.curves import Reading, readings
from ablate.experiments.analysis.evidence import Evidence, Pair, WholeBlocks
from ablate.experiments.analysis.statistics import (
    MOST_APART,
    RATIO,
    SHARE,
    Array,
    Fit,
    Scale,
    fit,
    holm,
    likelihood,
    mean_of,
    sign_flip_p,
    widening,
    without_luck,
)
from ablate.experiments.analysis.verdicts import Comparison, unit_of_shares
from ablate.experiments.design.metrics import (
    CURVE_METRICS,
    LOSS_METRICS,
    METRICS,
    PER_DEVICE,
    THROUGHPUT,
    WINDOW_METRICS,
)
from ablate.experiments.design.power import FEWEST_BLOCKS, ONE_LOOK, Look, detectable_per_sd
from ablate.experiments.design.spec_values import Difference
from ablate.experiments.design.verdict_rule import Primary
from ablate.experiments.outcomes import Outcome
from ablate.experiments.records.receipts import Receipt, read_named

LOST = math.log(2)
"""A trial that was cut short counts as so much beyond all others: half as fast as the slowest, in natural log units."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Data of the windows of one variant's blocks beside their totals."""

    by_median: tuple[float, ...]
    """d of every block from the windows' median steps."""
    outliers: tuple[tuple[int, int], ...]
    """Per block: steps far above their window's median, of the baseline and of the variant."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The differences of one variant on one metric, one per block or one per seed, in their order."""

    differences: tuple[float, ...]
    """d = ln(variant / baseline), or with `baseline` (variant - baseline) / abs(baseline)."""
    places: tuple[int, ...]
    """Place of the variant in the block minus the place of the baseline."""
    sums: tuple[float, ...] | None = None
    """ln(variant) + ln(baseline), or the sum of the shares: needed to compare the arms' spreads. None if only d is
    available."""
    window: Window | None = None
    """None if the metric is not one of the window."""
    baseline: float | None = None
    """Mean of the baseline in the metric's unit, for differences by subtraction."""
    independent: bool = False
    """Whether the differences of blocks do not resemble their neighbours', because no clock is in them."""
    bias: float | None = None
    """Of numbers of curves: the mean of the differences' estimated errors."""
    bound: Literal["at most", "at least"] | None = None
    """How the true differences relate to these, where runs that miss their target count at their end."""

    def proves(self, change: float) -> bool:
        """Return whether a change of this sign holds for the true differences too."""
        return self.bound is None or (self.bound == "at most") == (change < 0)

    def fit(self) -> Fit:
        """Fit the mean of the differences."""
        return replace(fit(self.differences, self.places), bias=self.bias or 0.0)

    def likelihood(self) -> Array:
        """Return the log likelihoods of autocorrelations of neighbouring differences."""
        return likelihood(self.differences, 1.0, self.places)

    def widening(self, dependence: float) -> float:
        """Return the factor by which tests are widened where neighbouring blocks have this autocorrelation."""
        return 1.0 if self.independent else widening(dependence, len(self.differences))

    def with_lost(self, lost: int) -> "tuple[Sample, ...]":
        """Return the samples in which `lost` more differences are at their worst, on either side; none for 0."""
        worst = (min(self.differences) - LOST, max(self.differences) + LOST) if lost else ()
        return tuple(
            replace(self, differences=(*self.differences, *[one] * lost), places=(*self.places, *[0] * lost))
            for one in worst
        )

    @property
    def scale(self) -> Scale:
        """How d and percent are converted."""
        return RATIO if self.baseline is None else SHARE


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Parameters of the tests of one metric."""

    family: int
    """Number of planned variants."""
    alphas: Mapping[str, float]
    """Two-sided level of each variant's question at this asking, over all looks."""
    margin_pct: float
    looks: Mapping[str, Look] = field(default_factory=dict)
    """The look of each variant; without one there is one look."""
    dependence: float = 0.0
    """Autocorrelation of neighbouring blocks by which the tests are widened."""
    better: Literal["higher", "lower"] | None = None
    """Direction of improvement of a declared metric."""

    def look_of(self, arm: str) -> Look:
        """Return the look at which a variant is judged."""
        return self.looks.get(arm, ONE_LOOK)


def sample_of(evidence: Evidence, metric: str, target: Difference | None = None) -> Sample | None:
    """Return d of every block, or of every seed of a loss; None with too few. Missing data fails: it gives None.

    `target` is the loss that is to be reached.
    """
    if metric in CURVE_METRICS:
        return _curve_sample(evidence, metric, None if target is None else target.value)
    return seed_sample(evidence, metric) if metric in LOSS_METRICS else _block_sample(evidence, metric)


def _curve_sample(evidence: Evidence, metric: str, target: float | None) -> Sample | None:
    """Return the difference of every block from the curves of its trials."""
    read = [both for pair in evidence.pairs if (both := readings(pair, metric, target)) is not None]
    if len(read) < max(len(evidence.pairs), FEWEST_BLOCKS):
        return None
    places = tuple(
        (pair.variant.ids.position - pair.baseline.ids.position) * METRICS[metric].clocked for pair in evidence.pairs
    )
    if METRICS[metric].kind == "loss":
        error = mean_of([own.error + base.error for own, base in read])
        finals = [_finite("loss_val", pair.baseline) or 0.0 for pair in evidence.pairs]
        sample = _by_subtraction(
            [(own.value, base.value) for own, base in read], places=places, baseline=mean_of(finals)
        )
        return sample and replace(sample, independent=False, bias=error / unit_of_shares(sample.baseline))
    return target_sample(metric, read, places)


def target_sample(metric: str, read: Sequence[tuple[Reading, Reading]], places: tuple[int, ...]) -> Sample | None:
    """Return the sample of tokens or seconds to a target, of the variant and the baseline in each block.

    None if runs that miss their target leave it open on which side of these the true differences lie.
    """
    sides = {side for own, base in read for side in (own.censored, -base.censored) if side}
    if len(sides) > 1:
        return None
    logs = [(math.log(own.value), math.log(base.value)) for own, base in read]
    return Sample(
        differences=tuple(own - base for own, base in logs),
        sums=tuple(own + base for own, base in logs),
        places=places,
        independent=not METRICS[metric].clocked,
        bias=mean_of([own.error + base.error for own, base in read]),
        bound=next(("at least" if side > 0 else "at most" for side in sides), None),
    )


def seed_sample(evidence: Evidence, metric: str) -> Sample | None:
    """Return the difference of every seed, the mean over its blocks, as a share of the baseline's mean.

    Seeds are the sample: the blocks of one seed repeat one run. None with too few seeds, or if a value is absent.
    """
    by_seed: dict[int, list[tuple[float, float]]] = {}
    for pair in evidence.pairs:
        own, base = (_finite(metric, receipt) for receipt in (pair.variant, pair.baseline))
        if own is None or base is None:
            return None
        by_seed.setdefault(pair.seed, []).append((own, base))
    if len(by_seed) < FEWEST_BLOCKS:
        return None
    means = [
        (mean_of([own for own, _ in values]), mean_of([base for _, base in values])) for values in by_seed.values()
    ]
    return _by_subtraction(means, places=(0,) * len(means))


def _by_subtraction(
    values: Sequence[tuple[float, float]], *, places: tuple[int, ...], baseline: float | None = None
) -> Sample | None:
    """Return the sample of (variant, baseline) in shares of `baseline`, by default of the baseline's mean.

    None if they are too far apart for statistics.
    """
    baseline = mean_of([base for _, base in values]) if baseline is None else baseline
    scale = unit_of_shares(baseline)
    if any(abs(value) / scale > MOST_APART for pair in values for value in pair):
        return None
    differences = tuple((own - base) / scale for own, base in values)
    sums = tuple((own + base) / scale for own, base in values)
    return Sample(differences=differences, sums=sums, places=places, baseline=baseline, independent=True)


def _finite(metric: str, receipt: Receipt) -> float | None:
    value = read_named(metric, receipt) if receipt.outcome is Outcome.MEASURED else None
    return value if value is not None and math.isfinite(value) else None


def baseline_mean(whole: WholeBlocks, metric: str) -> float | None:
    """Return the baseline's mean over seeds; None without a value."""
    by_seed: dict[int, list[float]] = {}
    for receipt in whole.of(whole.plan.baseline.name):
        value = _finite(metric, receipt)
        if value is not None:
            by_seed.setdefault(receipt.seed, []).append(value)
    return mean_of([mean_of(values) for values in by_seed.values()]) if by_seed else None


def paired_sample(evidence: Evidence, metric: str) -> Sample | None:
    """Return the difference of every block as a share of the baseline's mean, for a bound in the metric's unit."""
    values = [tuple(_finite(metric, receipt) for receipt in (pair.variant, pair.baseline)) for pair in evidence.pairs]
    whole = [(own, base) for own, base in values if own is not None and base is not None]
    if len(whole) < max(len(values), FEWEST_BLOCKS):
        return None
    places = tuple(pair.variant.ids.position - pair.baseline.ids.position for pair in evidence.pairs)
    return _by_subtraction(whole, places=places)


def _block_sample(evidence: Evidence, metric: str) -> Sample | None:
    every = [pair.log_ratio(metric) for pair in evidence.pairs]
    differences = tuple(d for d in every if d is not None)
    if len(differences) < max(len(every), FEWEST_BLOCKS):
        return None
    places = tuple(pair.variant.ids.position - pair.baseline.ids.position for pair in evidence.pairs)
    sums = tuple(_log_sum(pair, metric) for pair in evidence.pairs)
    return Sample(differences=differences, sums=sums, places=places, window=_window(evidence.pairs, metric))


def _log_sum(pair: Pair, metric: str) -> float:
    values = (read_named(metric, receipt) for receipt in (pair.variant, pair.baseline))
    return math.fsum(math.log(value or math.nan) for value in values)


def _window(pairs: Sequence[Pair], metric: str) -> Window | None:
    if metric not in WINDOW_METRICS:
        return None
    sign = 1 if METRICS[metric].better == "lower" else -1
    medians = tuple(
        sign * math.log(_median(pair.variant) / _median(pair.baseline))
        + math.log(_counted(metric, pair.variant) / _counted(metric, pair.baseline))
        for pair in pairs
    )
    return Window(by_median=medians, outliers=tuple((_outliers(p.baseline), _outliers(p.variant)) for p in pairs))


def _median(receipt: Receipt) -> float:
    return receipt.summary.step_s_median if receipt.summary else math.nan


def _counted(metric: str, receipt: Receipt) -> float:
    """Return the work of one step in the unit that `metric` counts: tokens, of a device, model FLOPs, or one step."""
    if metric in (THROUGHPUT, PER_DEVICE):
        timed = [step.tokens for step in receipt.steps if step.phase == "timed"]
        return sum(timed) / len(timed) / (1 if metric == THROUGHPUT else receipt.config.devices)
    return receipt.flops_per_step if metric == "model_tflops_per_s" else 1


def _outliers(receipt: Receipt) -> int:
    return receipt.summary.outlier_steps if receipt.summary else 0


def compare(metric: str, samples: Mapping[str, Sample], levels: Levels) -> dict[str, Comparison]:
    """Return the comparison of every variant; Holm's correction runs over all planned variants."""
    fits = {arm: sample.fit().widened(sample.widening(levels.dependence)) for arm, sample in samples.items()}
    margins = {
        arm: tuple(sample.scale.natural(sign * levels.margin_pct) for sign in (-1, 1))
        for arm, sample in samples.items()
    }
    p_different = {arm: one.p_different() if samples[arm].proves(float(one.mean)) else 1.0 for arm, one in fits.items()}
    p_same = {arm: 1.0 if samples[arm].bound else one.p_same(*margins[arm]) for arm, one in fits.items()}
    different, same = (
        _corrected([levels.look_of(arm).overall(p) for arm, p in each.items()], levels)
        for each in (p_different, p_same)
    )
    return {
        arm: _comparison(metric, samples[arm], one, arm, _Tests(levels, *corrected))
        for (arm, one), *corrected in zip(fits.items(), different, same, strict=True)
    }


def _corrected(p_values: Sequence[object], levels: Levels) -> list[float]:
    return [float(p) for p in holm(np.asarray(p_values, dtype=np.float64), levels.family)] if p_values else []


@dataclass(frozen=True)
class _Tests:
    levels: Levels
    p_different: float
    p_same: float


def _comparison(metric: str, sample: Sample, fitted: Fit, arm: str, tests: _Tests) -> Comparison:
    margin, window, alpha = tests.levels.margin_pct, sample.window, tests.levels.alphas[arm]
    percent, level = sample.scale.percent, tests.levels.look_of(arm).level(alpha / tests.levels.family)
    low, high = (percent(float(end)) for end in fitted.interval(level))
    tost_low, tost_high = (percent(float(end)) for end in fitted.interval(2 * level))
    delta = percent(float(fitted.mean))
    if tests.p_different <= alpha:
        low, high = (max(low, 0.0), high) if delta > 0 else (low, min(high, 0.0))
    if tests.p_same <= alpha:
        tost_low, tost_high = max(tost_low, -margin), min(tost_high, margin)
    sd, widened = float(fitted.sd), sample.widening(tests.levels.dependence)
    return Comparison(
        metric=metric,
        blocks=fitted.blocks,
        alpha=alpha,
        delta_pct=delta,
        median_pct=percent(float(np.median(sample.differences))),
        by_median_pct=None if window is None else percent(float(fit(window.by_median, sample.places).mean)),
        outlier_steps=None if window is None else _summed(window.outliers),
        ci_low_pct=low,
        ci_high_pct=high,
        tost_low_pct=tost_low,
        tost_high_pct=tost_high,
        p_sign_flip=float(sign_flip_p(sample.differences)),
        p_holm=tests.p_different,
        p_same=tests.p_same,
        sd_pct=100 * sd,
        widened=widened,
        place_pct=percent(float(fitted.slope)),
        mde_pct=percent(detectable_per_sd(fitted.blocks, level=level) * sd * widened + fitted.bias),
        bias_pct=None if sample.bias is None else percent(sample.bias),
        differences_pct=tuple(percent(difference) for difference in sample.differences),
        better=tests.levels.better,
        baseline=sample.baseline,
    )


def _summed(outliers: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(baseline for baseline, _ in outliers), sum(variant for _, variant in outliers)


def shrunk_pct(comparison: Comparison, primary: Primary) -> float:
    """Return the effect of an adopted variant without the mean luck of adopted ones; at least the interval's near end.

    Such a variant was adopted because its estimate is large enough, so that tends to be too large.
    """
    scale, sign = RATIO if comparison.baseline is None else SHARE, math.copysign(1, comparison.delta_pct)
    near = comparison.ci_low_pct if sign > 0 else comparison.ci_high_pct
    ends = (comparison.delta_pct, near, sign * primary.margin_pct, sign * primary.threshold_pct)
    gain, low, margin, threshold = (sign * scale.natural(pct) for pct in ends)
    se = comparison.se_pct / 100
    if se == 0:
        return comparison.delta_pct
    return scale.percent(sign * max(low, float(without_luck(gain, max(threshold, gain - low + margin), se))))
