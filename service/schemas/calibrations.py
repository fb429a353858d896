"""Wire types of calibrations: the measured noise of the nodes."""

from experiments.records.calibration import Calibration, Ledger
from service.schemas.public import Public


class CalibrationPublic(Public):
    """Noise of one device and workload, from A/A blocks, and whether the calibration is valid."""

    calibration: Calibration
    problem: str | None
    """Why it is not valid now; None when it is."""
    mended_by: str | None
    """The command that renews it; None when it is valid."""


class CalibrationList(Public):
    """Every calibration, newest last, and the ledger of A/A verdicts."""

    items: list[CalibrationPublic]
    ledger: Ledger
    statement: str
    """The conclusion from the ledger in one sentence."""
