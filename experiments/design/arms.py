"""The arm: the baseline or one variant of an ablation, fully resolved."""

from collections.abc import Mapping
from typing import Any

from experiments.documents import Frozen


class Arm(Frozen):
    """The baseline or one variant, fully resolved."""

    name: str
    role: str
    """`baseline` or `variant`."""
    gates: Mapping[str, Any]
    """Every gate with its resolved value, defaults included."""
    config: Mapping[str, Any]
    """TrainConfig as plain JSON, without the seed (the block sets it)."""
    digest: str
    """Digest of gates and config."""
