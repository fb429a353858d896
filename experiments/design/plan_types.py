"""What a plan consists of; apart from `experiments.design.plan`, whose statistics a node does not need."""

from pydantic import BaseModel, ConfigDict

from experiments.design.arms import Arm


class BlockPlan(BaseModel):
    """One seed's arms in the order in which they run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    seed: int
    order: tuple[str, ...]
    """Arm names; every arm exactly once."""


class Plan(BaseModel):
    """What a submitted spec will run. Stored whole; workers receive their block from it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
