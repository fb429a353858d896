"""What a plan consists of; apart from `experiments.design.plan`, whose statistics a node does not need."""

from experiments.design.arms import Arm
from experiments.documents import Frozen


class BlockPlan(Frozen):
    """One seed's arms in the order in which they run."""

    index: int
    seed: int
    order: tuple[str, ...]
    """Arm names; every arm exactly once."""


class Plan(Frozen):
    """What a submitted spec will run. Stored whole; workers receive their block from it."""

    ablation: str
    spec_digest: str
    rule_digest: str
    """Digest of the verdict rule with the estimator: hashed before the first sample."""
    node_class: str
    devices: int
    arms: tuple[Arm, ...]
    """Baseline first."""
    blocks: tuple[BlockPlan, ...]
    mde_pct_per_sd_pct: float
    """Detectable effect in percent for each percent of sd of the paired difference (5 % two-sided, 80 % power)."""
    expected_device_minutes: float | None
    """From earlier receipts of the same arms; None when nothing is known."""

    @property
    def baseline(self) -> Arm:
        """The arm that variants are compared with."""
        return self.arms[0]
