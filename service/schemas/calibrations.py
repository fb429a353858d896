"""Calibrations: what is known about the noise of the nodes."""

from experiments.records.calibration import Calibration, Ledger
from service.schemas.public import Public


class CalibrationPublic(Public):
    """What A/A blocks say about one device and workload, and whether that still holds."""

    calibration: Calibration
    problem: str | None
    """Why it admits nothing now; None when it does."""
    mended_by: str | None
    """The command that mends it."""


class CalibrationList(Public):
    """Everything that is known about noise, the newest last."""

    items: list[CalibrationPublic]
    ledger: Ledger
    statement: str
    """What the ledger supports, in one sentence."""
