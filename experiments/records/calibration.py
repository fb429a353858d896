"""Calibrations: the noise of one device, measured by A/A blocks, and the key that they are valid for.

An A/A block holds two trials of one configuration. Its difference d = ln(repeat / baseline) of throughput, or of
compile time where that decides, is pure noise.
"""

from typing import Literal, TypeAlias

from ablate.experiments.digest import digest
from ablate.experiments.documents import Frozen
from ablate.experiments.records.signing import PublicKey
from ablate.model.measurements import OmitNone

Source: TypeAlias = Literal["calibration", "hidden", "sentinel"]
"""Why an A/A block ran: to calibrate, as a hidden arm of an ablation, or to check that the noise is unchanged."""


class CalibrationKey(Frozen):
    """Device, workload and software that A/A blocks are valid for."""

    device_serial: str
    """Of the device; without one, the names of node and device."""
    node_class: str
    recipe: str
    shape_digest: str
    """Of the baseline's configuration without gates, seed and steps."""
    estimator_digest: str
    """Of estimator and window."""
    software_digest: str
    """Of the code and versions that ran."""
    metric: OmitNone[str] = None
    """A declared metric; None for ours, whose estimator tells them."""

    @property
    def workload(self) -> str:
        """Digest of everything except device and software."""
        return workload_digest(self.node_class, self.recipe, self.shape_digest, self.estimator_digest)


def workload_digest(node_class: str, recipe: str, shape: str, estimator: str) -> str:
    """Return the digest of a workload, which devices and versions of the code may share."""
    return digest([node_class, recipe, shape, estimator])


class AABlock(Frozen):
    """One A/A block, derived from its two receipts."""

    ablation: str
    block_index: int
    """Index of the block in the plan, from 0."""
    source: Source
    started_at: str
    """RFC 3339 UTC: start of its first trial."""
    difference: float
    """d = ln(repeat / baseline) of throughput, or of compile time where that decides."""
    place: int
    """Place of the repeat in the block minus place of the baseline."""
    log_rate: float
    """Mean over both trials of ln(tokens per second) or ln(compile seconds)."""
    clock_mhz: float | None
    """Median device clock over the timed steps of both trials; None where it cannot be read."""
    margin_pct: float
    """Practical margin of the ablation."""
    receipts: tuple[str, str]
    """Digests of both receipts, the baseline's first."""
    signed_by: OmitNone[PublicKey] = None
    """Key of the node that signed the block; None without a signature, or in records of earlier code."""


class Calibration(Frozen):
    """The noise of one key, sealed and cited by verdicts. All other fields follow from `samples`."""

    key: CalibrationKey
    metric: str
    blocks: int
    sd_pct: float
    """Standard deviation of d over the A/A blocks, in percent."""
    sd_upper_pct: float
    """Upper 95 % bound of the standard deviation, by chi squared."""
    mean_pct: float
    """Mean of d; zero apart from noise."""
    autocorrelation: float
    """Lag-one autocorrelation of d in time order."""
    position_effect_pct: float
    """Mean of the later trial minus the earlier one, in percent."""
    drift_pct_per_hour: float
    """Slope of `log_rate` against time within ablations; 0 of a declared metric, which differs from seed to seed."""
    largest_z: float
    """Largest |d - mean| in standard deviations."""
    clock_mhz: float | None
    """Median over the blocks."""
    variance_p: float | None
    """Chance of this much noise in sentinel and hidden blocks if they had the noise of the others; None without any."""
    ablations: tuple[str, ...]
    """Ablations that the blocks belong to."""
    measured_at: str
    """RFC 3339 UTC: start of the last A/A block."""
    samples: tuple[AABlock, ...]
    """In time order."""
    digest: str
    """Of everything above."""

    @property
    def bit_repeatable(self) -> bool:
        """Whether a number that a program reports repeated bit for bit, so that A/A blocks have no noise to measure."""
        return self.key.metric is not None and self.sd_pct == 0 and self.mean_pct == 0


class Ledger(Frozen):
    """False words over disjoint A/A ablations: the measured error rate of the service."""

    ablations: int = 0
    """A/A ablations of at least six blocks without common blocks, each judged as a first asking."""
    false_words: int = 0
    """Ablations that would have been called better or worse."""
    differing: int = 0
    """Ablations whose difference from zero was significant, regardless of the margin."""
    upper_bound: float = 1.0
    """Upper 95 % bound of the rate of false verdicts (Clopper and Pearson)."""


class ExpectedBlocks(Frozen):
    """How many blocks an ablation with looks takes on average."""

    change_pct: float
    """True change."""
    blocks: float


class Sizing(Frozen):
    """Effect that a design detects at the measured noise: of A/A blocks, or of a loss in an earlier ablation."""

    calibration: str | None
    """Digest of the calibration; None for a loss."""
    earlier: str | None = None
    """Name of the earlier ablation whose seeds differed most, for a loss."""
    baseline: float | None = None
    """Its baseline's mean, in the metric's unit: what percents are of."""
    sd_upper_pct: float
    """Upper 95 % bound of the standard deviation of d, on the noisiest calibrated device or over those seeds."""
    mde_pct: float
    """Effect that the design detects with 80 % power, corrected for all variants."""
    proved_pct: float
    """Gain that it proves to be beyond the margin with 80 % power."""
    adopted_pct: float
    """True gain that it adopts in 80 % of cases: the estimate must reach the threshold too."""
    adopt_if_pct: float
    """Estimate from which a variant is adopted."""
    aim_pct: float
    """Gain for which `blocks_needed` is: the threshold, or twice the margin if it is not above the margin."""
    blocks_needed: int | None
    """Fewest blocks, or seeds of a loss, that prove a gain of `aim_pct` to be beyond the margin, with the power of a
    planned design; None when no allowed number does."""
    expected: tuple[ExpectedBlocks, ...] = ()
    """Of a design with several looks, for a few true changes, at the measured noise."""
