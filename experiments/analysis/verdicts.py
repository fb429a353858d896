"""The verdict: the answer of an ablation, variant by variant, with its numbers and the rule behind it."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from experiments.design.metrics import METRICS
from experiments.documents import Frozen
from experiments.outcomes import Decision, VerdictWord
from experiments.records.circumstances import Circumstances
from model.measurements import Metric, OmitNone


class ExactPair(Frozen):
    """The values of one seed. Each is what every repeat gave, in the metric's unit."""

    seed: int
    repeats: int
    """Blocks that ran with this seed, at least two."""
    baseline: float
    variant: float

    @property
    def change(self) -> float:
        """The variant's value minus the baseline's, in the metric's unit."""
        return self.variant - self.baseline

    @property
    def change_pct(self) -> float | None:
        """The change in percent of the baseline's value; None where that is 0 and the variant's is not."""
        if self.baseline:
            return 100 * self.change / abs(self.baseline)
        return None if self.change else 0.0


class ExactComparison(Frozen):
    """One exact metric of one variant beside the baseline, seed by seed."""

    metric: str
    blocks: int
    seeds: tuple[ExactPair, ...]
    """One for each seed whose repeats agree in both arms."""
    problems: tuple[str, ...] = ()
    """What shows that it is not exact here: repeats that differ."""
    unrepeated: tuple[int, ...] = Field(default=(), exclude_if=lambda seeds: not seeds)
    """Seeds that ran in one block only, whose values therefore prove nothing."""

    @property
    def gains_pct(self) -> tuple[float, ...]:
        """The change of every seed as improvement: positive is better; infinite where the baseline has 0."""
        return tuple(_gain_pct(METRICS[self.metric], pair) for pair in self.seeds)


def _gain_pct(metric: Metric, pair: ExactPair) -> float:
    change = math.copysign(math.inf, pair.change) if pair.change_pct is None else pair.change_pct
    return change if metric.better == "higher" else -change


class Cause(StrEnum):
    """Why a word is `inconclusive`; people read "inconclusive: stalls differ"."""

    MISSING = "blocks are missing"
    NOT_PROVED = "not proved"
    STALLS = "stalls differ"
    SPREADS = "spreads differ"
    RERUNS = "reruns"
    UNCALIBRATED = "uncalibrated"
    OTHER_WORK = "other work"


class Comparison(Frozen):
    """One metric of one variant against the baseline, paired by block: d = ln(variant / baseline).

    Levels hold for all variants together and for every asking of the question; both intervals are simultaneous.
    """

    metric: str
    blocks: int
    alpha: float
    """Two-sided level of this asking and look. The intervals' confidence is 1 - alpha and 1 - 2 alpha."""
    delta_pct: float
    """Mean of d without the effect of places, as percent: 100 * (exp(mean) - 1)."""
    median_pct: float
    """Median of d."""
    by_median_pct: float | None
    """The same effect from the medians of the windows, which stalls do not move; None for other metrics."""
    outlier_steps: tuple[int, int] | None
    """Steps far above their window's median, of the baseline and of the variant; none is left out."""
    ci_low_pct: float
    ci_high_pct: float
    """Interval of the effect; it ends at zero where Holm's correction proves a difference and it would reach beyond."""
    tost_low_pct: float
    tost_high_pct: float
    """Interval of the two one-sided tests; it ends at the margin where Holm's correction proves sameness."""
    p_sign_flip: float
    """Exact two-sided sign-flip p value of this variant alone; from 17 blocks by seeded flips."""
    p_holm: float
    """Paired t p value of a difference after Holm's correction over the variants; this one decides."""
    p_same: float
    """p value of the two one-sided tests of sameness, corrected likewise."""
    sd_pct: float
    """Standard deviation of d around mean and place."""
    widened: float = 1.0
    """Factor by which tests and intervals are wider because neighbouring A/A blocks resemble each other."""
    place_pct: float
    """Effect of standing one place later in the block."""
    mde_pct: float
    """Minimum detectable effect (80 % power) at these blocks, this sd and this level, corrected for the variants."""
    differences_pct: tuple[float, ...]
    """d of every block as percent, in block order."""


class RequirementResult(Frozen):
    """One `require` entry of the rule, judged."""

    metric: str
    rule: str
    """The rule in words, for example "max_delta 6.0 GiB" or "identical"."""
    passed: bool
    detail: str
    exact: bool
    """Whether values without noise decided: bytes, losses that must be identical. Such a failure rejects by itself."""
    compared: bool = True
    """False where the gates claim another numerical model: its losses are not held against the baseline's."""


class VariantVerdict(Frozen):
    """The answer for one variant, with the numbers and the rule behind it."""

    arm: str
    verdict: VerdictWord
    """The published word; capped at `inconclusive` without calibration, and where an arm may have caused reruns."""
    measured: VerdictWord
    """What the samples alone say."""
    cause: Cause | None = None
    """Why the published word is `inconclusive`; None for other words."""
    beyond_margin: bool = False
    """Whether the whole interval lies beyond the margin: only then is it a change by more than the margin."""
    reason: str
    """One sentence: why this word."""
    decision: Decision
    missing: OmitNone[str] = None
    """Which blocks or values are missing, and why, where that keeps it from an answer."""
    no_baseline: OmitNone[str] = None
    """How the baseline ended, where there is nothing to compare with, such as "failed in 2 of 2 trials"."""
    other_work: OmitNone[str] = None
    """In what its work differs, where the metric that decides counts that: then there is no word."""
    other_model: OmitNone[str] = None
    """In which gates that change the numerical model it differs from the baseline."""
    primary: Comparison | None
    """By statistics; None where the primary metric is exact, and where there are no numbers."""
    exact: ExactComparison | None = None
    """By value, where the primary metric is exact."""
    secondary: tuple[Comparison, ...] = ()
    """Other metrics on the same footing, for information."""
    requirements: tuple[RequirementResult, ...] = ()
    gates_live: str
    """For example "18/18" or "17/18, not live: lane"."""
    chances: Mapping[int, float] = {}
    """Chance that another ablation of so many blocks answers, given these samples; when inconclusive."""
    blocks_needed: int | None = None
    """The fewest of them with a chance of at least 80 %; None when none has."""
    device_minutes_needed: float | None = None
    """What those blocks cost."""
    notes: tuple[str, ...] = ()


class NodeMeans(Frozen):
    """What one arm did on one node."""

    blocks: int
    tokens_per_s: float | None
    step_s: float | None


class ArmSummary(Frozen):
    """One arm over the blocks that count. Means are None where a measured trial lacks the value, or none measured."""

    tokens_per_s: float | None
    step_s: float | None
    model_tflops_per_s: float | None
    mfu: float | None
    loss_step1: float | None
    loss_final: float | None
    loss_val: float | None
    compile_s: float | None
    peak_allocated_bytes: int | None
    """Largest over the trials that measured or ran out of memory; None where none recorded it."""
    peak_reserved_bytes: int | None
    outlier_steps: int
    """Timed steps of measured trials far above their trial's median; they count in the means all the same."""
    outcomes: Mapping[str, int]
    """Trials by outcome."""
    by_node: OmitNone[Mapping[str, NodeMeans]] = None
    """By name, where trials were measured on several nodes: then the means above are over machines of unequal speed."""


class Verdict(Frozen):
    """The answer of an ablation."""

    ablation: str
    spec_digest: str
    rule_digest: str
    rule: Mapping[str, Any]
    circumstances: Circumstances
    """Broken attempts, earlier askings and A/A blocks, as the judge knew them."""
    blocks_planned: int
    blocks_counted: int
    node_class: str
    baseline: str
    variants: tuple[VariantVerdict, ...]
    arms: Mapping[str, ArmSummary]
    """Every arm by itself, the baseline among them."""
    digest: str

    @property
    def calibrated(self) -> bool:
        """Whether words may be published: A/A blocks are known for what ran."""
        return self.circumstances.admission.refused_because is None
