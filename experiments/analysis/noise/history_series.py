"""What is told of a recipe's baseline over time, as a document."""

from experiments.documents import Frozen

MIN_POINTS = 8
"""Fewer say neither where a level changed nor how far it went."""


class HistoryPoint(Frozen):
    """What the baseline of one ablation measured."""

    ablation: str
    name: str
    at: str
    """RFC 3339 UTC: start of its first trial."""
    value: float
    """Geometric mean over its trials, in the metric's unit."""
    trials: int
    code: str
    """Digest of the code that ran."""


class LevelChange(Frozen):
    """A point from which on the level is another one."""

    ablation: str
    at: str
    change_pct: float
    """Of the level that begins here against the one before."""
    worse: bool | None
    """None where the metric claims no direction."""
    code_changed: bool
    """Whether its code is another than that of the point before."""


class AnchorDrift(Frozen):
    """The newest points against the oldest."""

    change_pct: float
    low_pct: float
    high_pct: float
    """95 % interval, from the scatter between neighbouring points."""
    worse: bool | None
    """Whether all of the interval is a loss; None where the metric claims no direction."""


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
