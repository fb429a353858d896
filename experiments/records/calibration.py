"""Calibration: what A/A blocks say about the noise of one device, and what keeps that knowledge apart from others.

An A/A block holds two trials of one configuration. Its difference d = ln(repeat / baseline) of what decides
(throughput, or compile time) is noise and nothing else, and all that a real difference has to be told from.
"""

from typing import Literal, TypeAlias

from experiments.digest import digest
from experiments.documents import Frozen


class Sizing(Frozen):
    """What a design can see at the noise that was measured."""

    calibration: str
    """Digest of the calibration."""
    sd_upper_pct: float
    """Upper 95 % bound of the standard deviation of d: of the noisiest device that was calibrated."""
    mde_pct: float
    """Effect that the design finds with 80 % power, all variants corrected."""
    adopt_if_pct: float
    """Effect from which a variant is adopted."""
    blocks_needed: int | None
    """Fewest blocks that find an effect of `adopt_if_pct` with the power of a planned design, what stalls withhold by
    chance taken into account; None when no allowed number does."""


Source: TypeAlias = Literal["calibration", "hidden", "sentinel"]
"""Why an A/A block ran: to calibrate, as a hidden arm of an ablation, or to see whether the noise is still the same."""


class CalibrationKey(Frozen):
    """What A/A blocks hold for. Another value in any field is another key."""

    device_serial: str
    """Of the device; where it has none, the names of node and device."""
    node_class: str
    recipe: str
    shape_digest: str
    """Of the baseline's configuration without its gates, seed and steps."""
    estimator_digest: str
    """Of estimator and window."""
    software_digest: str
    """Of code and versions that ran."""

    @property
    def workload(self) -> str:
        """Digest of everything but device and software."""
        return workload_digest(self.node_class, self.recipe, self.shape_digest, self.estimator_digest)


def workload_digest(node_class: str, recipe: str, shape: str, estimator: str) -> str:
    """Return the digest of a workload, which keys of several devices and versions of the code share."""
    return digest([node_class, recipe, shape, estimator])


class AABlock(Frozen):
    """One A/A block, as its two receipts have it."""

    ablation: str
    block_index: int
    """Index of the block in the plan, from 0."""
    source: Source
    started_at: str
    """RFC 3339 UTC: start of its first trial."""
    difference: float
    """d = ln(repeat / baseline) of throughput, or of compile time where that decided."""
    place: int
    """Place of the repeat in the block minus place of the baseline."""
    log_rate: float
    """Mean over both trials of ln(tokens per second), or of ln(seconds of compiling)."""
    clock_mhz: float | None
    """Median device clock over the timed steps of both; None where it cannot be read."""
    margin_pct: float
    """Practical margin of the ablation."""
    receipts: tuple[str, str]
    """Digests of both receipts, the baseline's first."""


class Calibration(Frozen):
    """The noise of one key: a sealed receipt that verdicts cite. Everything but `samples` follows from them."""

    key: CalibrationKey
    metric: str
    blocks: int
    sd_pct: float
    """Standard deviation of d over the A/A blocks, in percent."""
    sd_upper_pct: float
    """Upper 95 % bound of the standard deviation, by chi squared."""
    mean_pct: float
    """Mean of d: zero but for noise."""
    autocorrelation: float
    """Lag-one autocorrelation of d in time order."""
    position_effect_pct: float
    """Mean of the later trial minus the earlier one, in percent."""
    drift_pct_per_hour: float
    """Slope of `log_rate` against time within ablations."""
    largest_z: float
    """Largest |d - mean| in standard deviations: the tails."""
    clock_mhz: float | None
    """Median over the blocks."""
    variance_p: float | None
    """Chance of so much noise in sentinel and hidden blocks if it were that of the others; None without such blocks."""
    ablations: tuple[str, ...]
    """The ablations behind it."""
    measured_at: str
    """RFC 3339 UTC: start of the last A/A block."""
    samples: tuple[AABlock, ...]
    """In time order."""
    digest: str
    """Of everything above."""


class Ledger(Frozen):
    """False words over disjoint A/A ablations: the error rate that the service has measured on itself."""

    ablations: int = 0
    """A/A ablations of at least six blocks that share none, each judged by the rule of a first asking."""
    false_words: int = 0
    """Those that would have been called better or worse."""
    differing: int = 0
    """Those in which the difference from zero was significant, whatever the margin."""
    upper_bound: float = 1.0
    """Upper 95 % bound of the rate of false words (Clopper and Pearson)."""
