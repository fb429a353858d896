"""What a design can see at the noise that was measured, as it is told to who submits."""

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
