"""Documents on a recipe's baseline over time."""

from ablate.experiments.documents import Frozen

MIN_POINTS = 8
"""Fewest points for changes of level and drift."""


class HistoryPoint(Frozen):
    """Measurement of the baseline of one ablation."""

    ablation: str
    name: str
    at: str
    """RFC 3339 UTC: start of its first trial."""
    value: float
    """Geometric mean over its trials, in the metric's unit."""
    trials: int
    code: str
    """Digest of the code that ran, a program's included."""
    data: str
    """Digest of the dataset: files of a corpus may change while its name stays."""


class LevelChange(Frozen):
    """A point at which a new level begins."""

    ablation: str
    at: str
    change_pct: float
    """Change of the new level against the level before."""
    worse: bool | None
    """None if the metric has no direction."""
    code_changed: bool
    """Whether its code differs from the code of the point before."""
    data_changed: bool
    """Whether its dataset differs from the dataset of the point before."""

    @property
    def difference(self) -> str:
        """What differs from the point before, such as "other code, same data"."""
        code, data = ("other" if changed else "same" for changed in (self.code_changed, self.data_changed))
        return f"{code} code, {data} data"


class AnchorDrift(Frozen):
    """Change of the newest points against the oldest."""

    change_pct: float
    low_pct: float
    high_pct: float
    """95 % interval, from the scatter between neighbouring points."""
    worse: bool | None
    """Whether the whole interval is a loss; None if the metric has no direction."""


class HistorySeries(Frozen):
    """One metric of one baseline configuration on one device, oldest first."""

    metric: str
    node_class: str
    device: str
    arm_digest: str
    points: tuple[HistoryPoint, ...]
    changes: tuple[LevelChange, ...] = ()
    since_anchor: AnchorDrift | None = None
    """None with fewer points than `MIN_POINTS`."""
