"""Verdict documents: the answer of an ablation per variant, with its numbers and the rule behind it."""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from ablate.experiments.design.metrics import METRICS
from ablate.experiments.documents import Frozen
from ablate.experiments.outcomes import GOOD, Decision, Required, VerdictWord
from ablate.experiments.records.circumstances import Circumstances
from ablate.model.measurements import KernelFacts, Metric, OmitNone


class ExactPair(Frozen):
    """The values of one seed in the metric's unit; every repeat gave the same."""

    seed: int
    repeats: int
    """Number of blocks with this seed, at least two."""
    baseline: float
    variant: float

    @property
    def change(self) -> float:
        """The variant's value minus the baseline's, in the metric's unit."""
        return self.variant - self.baseline

    @property
    def change_pct(self) -> float | None:
        """The change in percent of the baseline's value; None if only the baseline's value is 0."""
        if self.baseline:
            return 100 * self.change / abs(self.baseline)
        return None if self.change else 0.0


class ExactComparison(Frozen):
    """One exact metric of one variant and the baseline, seed by seed."""

    metric: str
    blocks: int
    seeds: tuple[ExactPair, ...]
    """One per seed whose repeats agree in both arms."""
    problems: tuple[str, ...] = ()
    """Repeats that differ, which shows that the metric is not exact here."""
    unrepeated: tuple[int, ...] = Field(default=(), exclude_if=lambda seeds: not seeds)
    """Seeds that ran in one block only, so their values prove nothing."""

    @property
    def gains_pct(self) -> tuple[float, ...]:
        """The change of every seed as improvement: positive is better; infinite if the baseline is 0."""
        return tuple(_gain_pct(METRICS[self.metric], pair) for pair in self.seeds)


def _gain_pct(metric: Metric, pair: ExactPair) -> float:
    change = math.copysign(math.inf, pair.change) if pair.change_pct is None else pair.change_pct
    return change if metric.better == "higher" else -change


class Cause(StrEnum):
    """Why a verdict is `inconclusive`, shown for example as "inconclusive: stalls differ"."""

    MISSING = "blocks are missing"
    NOT_PROVED = "not proved"
    ABOVE_ZERO = "above zero, maybe below the margin"
    """A gain is proved, and neither that it exceeds the margin nor that it does not."""
    BELOW_ZERO = "below zero, maybe within the margin"
    """The same of a loss."""
    STALLS = "stalls differ"
    SPREADS = "spreads differ"
    NOISE = "noise differs"
    """The blocks scatter far more than the A/A blocks of the device."""
    RERUNS = "reruns"
    CARRY_OVER = "carry-over"
    """The verdict does not hold without what a trial of the arm does to the next trial."""
    RARE_EVENTS = "rare events"
    """The rule names a rarest event, for which the blocks so far are too few."""
    UNCALIBRATED = "uncalibrated"
    OTHER_WORK = "other work"
    CLOCKS = "clocks differ"
    """The worker's clock gives another effect on a command's windows, by more than the margin."""
    NO_RATIO = "no ratio"
    """A declared metric is not above zero in some trial, so a relative margin means nothing."""
    TARGET = "target outside of the curves"
    """A trial does not reach the target loss, or has reached it at its first validation."""
    COARSE = "its steps exceed the margin"
    """A loss or a declared metric comes in steps, as a share of few examples does, so no sameness below one shows."""
    REPEATED_SEEDS = "seeds repeat a run"
    """A loss or a declared metric does not depend on the seed, or is the same with two seeds in both arms."""


OPEN = frozenset({Cause.NOT_PROVED, Cause.ABOVE_ZERO, Cause.BELOW_ZERO})
"""Causes that more blocks may remove."""


class Comparison(Frozen):
    """One metric of one variant against the baseline, paired by block: d = ln(variant / baseline).

    The level covers all variants and all askings of the question. Both intervals are simultaneous.
    """

    metric: str
    blocks: int
    alpha: float
    """Two-sided level of this asking. The intervals have the confidence 1 - alpha and 1 - 2 alpha over all looks."""
    delta_pct: float
    """Mean of d, corrected for places, in percent: 100 * (exp(mean) - 1)."""
    median_pct: float
    """Median of d."""
    by_median_pct: float | None
    """The same effect from the median steps of the windows, which stalls do not move; None for other metrics."""
    outlier_steps: tuple[int, int] | None
    """Steps far above their window's median, of the baseline and of the variant; all of them are counted."""
    ci_low_pct: float
    ci_high_pct: float
    """Interval of the effect. It is cut at zero if Holm's correction proves a difference."""
    tost_low_pct: float
    tost_high_pct: float
    """Interval of the two one-sided tests. It is cut at the margin if Holm's correction proves sameness."""
    p_sign_flip: float
    """Two-sided sign-flip p value of this variant alone: exact up to 16 blocks, by seeded flips beyond."""
    p_holm: float
    """Paired t p value of a difference over all looks, after Holm's correction over the variants; this one decides."""
    p_same: float
    """p value of the two one-sided tests of sameness, with the same correction."""
    sd_pct: float
    """Standard deviation of d around mean and place."""
    widened: float = 1.0
    """Factor by which tests and intervals are wider for a correlation of neighbouring blocks that A/A blocks and these
    blocks leave open."""
    place_pct: float
    """Effect of one place later in the block."""
    mde_pct: float
    """Minimum detectable effect (80 % power) at these blocks, this sd and this level, corrected for the variants."""
    bias_pct: OmitNone[float] = None
    """Estimated largest error of curves that are linear between validations, as a mean over the blocks; both intervals
    and both p values allow for it. None for other metrics."""
    differences_pct: tuple[float, ...]
    """d of every block as percent, in block order."""
    better: OmitNone[Literal["higher", "lower"]] = None
    """Direction of improvement of a declared metric; None for our metrics, which `METRICS` describes."""
    baseline: OmitNone[float] = None
    """Mean of the baseline over the seeds, of a loss: `blocks` is then the number of seeds, d is (variant - baseline) /
    abs(baseline), and no place is taken into account."""

    @property
    def se_pct(self) -> float:
        """Standard error of `delta_pct`, widened."""
        return self.sd_pct * self.widened / math.sqrt(self.blocks)

    @property
    def unit(self) -> Literal["blocks", "seeds"]:
        """What `blocks` counts."""
        return "blocks" if self.baseline is None else "seeds"


def unit_of_shares(baseline: float | None) -> float:
    """Return the amount whose share is 1: the size of the baseline's mean, 1 without one or for zero."""
    return abs(baseline or 0.0) or 1.0


class ControlResult(Frozen):
    """The control, which repeats the baseline, compared with it as a variant is: all of its effect is noise."""

    arm: str
    primary: Comparison


class RequirementResult(Frozen):
    """Result of one `require` entry of the rule."""

    metric: str
    rule: str
    """The rule as text, for example "max_delta 6.0 GiB" or "identical"."""
    passed: bool
    undecided: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether the data prove neither that the requirement is met nor that it is not, as where values are missing."""
    detail: str
    exact: bool
    """Whether values without noise decided: bytes, or losses that must be identical. Such a failure rejects alone."""
    compared: bool = True
    """False if the gates claim another numerical model; its losses are then not compared with the baseline's."""


class KernelUse(Frozen):
    """One kernel in the profiled steps of an arm's trials."""

    calls: float
    """In one step, as a mean over the trials."""
    us: float
    """Microseconds in one step, as a mean over the trials."""
    facts: OmitNone[KernelFacts] = None
    """The launch with the most time in the trials, and means of the other numbers; None if a trial with this kernel has
    no facts of it."""


class KernelChange(Frozen):
    """A kernel in a variant and in the baseline; None where an arm did not run it."""

    name: str
    baseline: KernelUse | None
    variant: KernelUse | None

    @property
    def change_us(self) -> float:
        """Microseconds that the variant spends more."""
        return (self.variant.us if self.variant else 0.0) - (self.baseline.us if self.baseline else 0.0)

    @property
    def same_calls(self) -> bool:
        """Whether both arms call it equally often."""
        return self.variant is not None and self.baseline is not None and self.variant.calls == self.baseline.calls

    @property
    def kind(self) -> str:
        """What differs, in words."""
        if self.variant is None or self.baseline is None:
            return "only in the baseline" if self.variant is None else "only in the variant"
        return "calls" if not self.same_calls else "launch" if self.launch_differences else "time"

    @property
    def launch_differences(self) -> tuple[str, ...]:
        """Say how its launches differ between the arms, apart from the number of blocks, which follows the sizes."""
        own, base = (None if use is None else use.facts for use in (self.variant, self.baseline))
        if own is None or base is None:
            return ()
        numbers = (
            (own.registers, base.registers, "registers"),
            (own.shared_bytes, base.shared_bytes, "bytes of shared memory"),
            (own.threads, base.threads, "threads a block"),
        )
        differences = [
            f"{mine:,} instead of {other:,} {what}"
            for mine, other, what in numbers
            if mine is not None and other is not None and mine != other
        ]
        if differences and None not in (own.occupancy, base.occupancy) and own.occupancy != base.occupancy:
            differences.append(f"an occupancy of {own.occupancy:.1%} instead of {base.occupancy:.1%}")
        return tuple(differences)


class StepKernels(Frozen):
    """The kernels of a variant's profiled step against the baseline's."""

    same: bool
    """Whether both arms call the same kernels equally often; their sizes may differ."""
    kernels: int
    """Kernels of both arms."""
    changes: tuple[KernelChange, ...]
    """The largest changes of time, the largest first."""


class Costs(Frozen):
    """What a variant's training took, as multiples of the baseline's; None where nobody knows."""

    tokens: float | None
    flops: float | None
    """Model FLOPs, forward and backward."""
    parameters: float | None
    seconds: float | None
    """Of all steps, at the mean of the timed ones."""

    def in_words(self) -> Iterator[str]:
        """Yield each known cost, for example "1.31 times the model FLOPs" or "equal tokens"."""
        for name, multiple in (("tokens", self.tokens), ("model FLOPs", self.flops), ("parameters", self.parameters)):
            if multiple is not None:
                yield f"equal {name}" if multiple == 1 else f"{_shown(multiple)} times the {name}"
        if self.seconds is not None:
            yield f"{_shown(float(f'{self.seconds:.3g}'))} times the seconds, as measured"


def _shown(multiple: float) -> str:
    return f"{multiple:,.4g}" if multiple < 1 else f"{multiple:,.2f}".rstrip("0").rstrip(".")


class Nodes(Frozen):
    """The nodes of which a verdict speaks."""

    names: tuple[str, ...]
    differ: bool
    """Whether it is proved that their effects differ (F test, 5 %)."""

    def in_words(self) -> str:
        """Return the scope of the verdict, for example "on these 2 nodes, which differ"."""
        return f"on these {len(self.names)} nodes{', which differ' if self.differ else ''}"


NOT_OBSERVED = "not observed here"
"""Before the names of the gates that no fact shows, in `gates_live`."""


class VariantVerdict(Frozen):
    """The answer on one variant, with the numbers and the rule behind it."""

    arm: str
    verdict: VerdictWord
    """The published verdict; `inconclusive` at most without calibration, or if an arm may have caused reruns."""
    measured: VerdictWord
    """The verdict of the samples alone."""
    cause: Cause | None = None
    """Why the published verdict is `inconclusive`; None for other verdicts."""
    reason: str
    """One sentence on the reason of the verdict."""
    decision: Decision
    missing: OmitNone[str] = None
    """Which blocks or values are missing, and why, if that prevents an answer."""
    no_baseline: OmitNone[str] = None
    """How the baseline ended if there is nothing to compare with, such as "failed in 2 of 2 trials"."""
    other_work: OmitNone[str] = None
    """How the variant's work differs, if the deciding metric counts that; there is no verdict then."""
    other_model: OmitNone[str] = None
    """Gates that change the numerical model and differ from the baseline's."""
    nodes: OmitNone[Nodes] = None
    """Where it was compared by times, if several nodes ran blocks; the verdict speaks of no other node."""
    costs: OmitNone[Costs] = None
    """Of the training, if a loss decides or is required between models, batches or data that differ."""
    primary: Comparison | None
    """Comparison by statistics; None for an exact primary metric, or without numbers."""
    exact: ExactComparison | None = None
    """Comparison by values, for an exact primary metric."""
    shrunk_pct: OmitNone[float] = None
    """Of a kept proposal: the effect in percent without the mean luck of kept ones."""
    secondary: tuple[Comparison, ...] = ()
    """Other metrics, computed in the same way, for information."""
    requirements: tuple[RequirementResult, ...] = ()
    gates_live: str
    """For example "18/18" or "17/18, not live: lane, not observed here: tma": the gates that facts show."""
    chances: Mapping[int, float] = {}
    """By number of blocks, the chance that another ablation answers given these samples; if inconclusive."""
    blocks_needed: int | None = None
    """The smallest of these numbers with a chance of at least 80 %; None without one."""
    device_minutes_needed: float | None = None
    """Cost of these blocks."""
    notes: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = Field(default=(), exclude_if=lambda texts: not texts)
    """Numbers that a program printed otherwise than they count."""
    step_kernels: OmitNone[StepKernels] = None
    """None unless every whole trial of both arms has a profiled step, also one refused for want of a kernel."""

    def meets(self, required: Required) -> bool:
        """Return whether the variant is what `--require` demands."""
        if required is Required.NOT_WORSE:
            return self._not_worse and all(one.passed and not one.undecided for one in self.requirements)
        return self.decision == required.value

    @property
    def _not_worse(self) -> bool:
        return self.verdict in GOOD or self.cause is Cause.ABOVE_ZERO

    def shortfall(self, required: Required) -> str:
        """Say what the variant is instead, for example "worse" or "better, but loss_val identical is not met"."""
        if required is not Required.NOT_WORSE:
            return str(self.decision)
        unmet = [f"{one.metric} {one.rule}" for one in self.requirements if not one.passed or one.undecided]
        if not self._not_worse:
            return str(self.verdict)
        return f"{self.verdict}, without proof of {', '.join(unmet)}"


class OwnNoise(Frozen):
    """The noise that an A/A ablation shows."""

    blocks: int
    """A/A blocks that count: both trials measured, no guard hit."""
    sd_pct: OmitNone[float] = None
    """Standard deviation of the difference of the two equal arms; None with fewer than two blocks."""


class LargestMicroBatch(Frozen):
    """The most rows in a step that fit, among arms that differ in nothing else."""

    arm: str
    """All of its trials measured. Its peak is in its summary."""
    rows: int
    too_many_arm: str
    """The arm with the fewest rows that ran out of memory."""
    too_many_rows: int


class NodeMeans(Frozen):
    """Means of one arm on one node."""

    blocks: int
    tokens_per_s: float | None
    step_s: float | None


class ArmSummary(Frozen):
    """One arm over the blocks that count. A mean is None if a measured trial lacks the value, or none measured."""

    tokens_per_s: float | None
    step_s: float | None
    model_tflops_per_s: float | None
    utilisation: float | None
    """Share of the device's peak that useful FLOPs reach (`Summary.utilisation`)."""
    loss_step1: float | None
    loss_final: float | None
    loss_val: float | None
    compile_s: float | None
    peak_allocated_bytes: int | None
    """Largest over the trials that measured or ran out of memory; None without records."""
    peak_reserved_bytes: int | None
    outlier_steps: int
    """Timed steps of measured trials far above their trial's median; the means include them."""
    outcomes: Mapping[str, int]
    """Trials by outcome."""
    foreign_load: OmitNone[float] = None
    """Mean share of the cores' time that others took while its trials measured; None where it was not measured, and in
    verdicts of earlier programs."""
    by_node: OmitNone[Mapping[str, NodeMeans]] = None
    """By name of the node, if several nodes ran trials; the means above are then over nodes of unequal speed."""


class SeedReport(Frozen):
    """The seeds of the trials behind a verdict."""

    origin: Literal["chosen", "drawn", "unregistered"]
    """Listed by the spec; drawn after the spec was fixed; or drawn for a plan that no service registered."""
    used: tuple[int, ...]
    """In the order of their blocks, of blocks with receipts."""
    taken: bool = Field(default=True, exclude_if=lambda taken: taken)
    """Whether the program takes them, as far as its command and its reports show."""


class Verdict(Frozen):
    """The answer of an ablation."""

    ablation: str
    spec_digest: str
    rule_digest: str
    rule: Mapping[str, Any] = Field(title="Stored rule")  # the name of its type in generated clients
    circumstances: Circumstances
    """Broken attempts, earlier askings and A/A blocks that the judge took into account."""
    blocks_planned: int
    blocks_counted: int
    node_class: str
    seeds: SeedReport
    baseline: str
    variants: tuple[VariantVerdict, ...]
    arms: Mapping[str, ArmSummary]
    """Summary of every arm, including the baseline."""
    control: OmitNone[ControlResult] = None
    """None without a control that measured, and in verdicts of earlier programs."""
    own_noise: OmitNone[OwnNoise] = None
    """Of an A/A ablation; None for other ones, and in verdicts of earlier programs."""
    largest_micro_batch: OmitNone[LargestMicroBatch] = None
    """None unless one number of rows fits and a larger one does not, and in verdicts of earlier programs."""
    digest: str

    @property
    def calibrated(self) -> bool:
        """Whether A/A blocks allow verdicts to be published."""
        return self.circumstances.admission.refused_because is None
