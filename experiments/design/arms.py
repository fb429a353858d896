"""The arm: the baseline or one variant of an ablation, fully resolved."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Arm(BaseModel):
    """The baseline or one variant, fully resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: str
    """`baseline` or `variant`."""
    gates: Mapping[str, Any]
    """Every gate with its resolved value, defaults included."""
    config: Mapping[str, Any]
    """TrainConfig as plain JSON, without the seed (the block sets it)."""
    digest: str
    """Digest of gates and config."""
