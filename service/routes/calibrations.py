"""The route about the noise of the nodes, as measured by A/A blocks."""

import time

from fastapi import APIRouter
from sqlalchemy import Connection

from experiments.analysis.noise.admission import mending_command, standing_problems
from experiments.records.calibration import Calibration
from experiments.reporting.wording import false_verdicts
from service.http.deps import Reader, ServicesDep
from service.http.responses import secured
from service.schemas.calibrations import CalibrationList, CalibrationPublic
from service.store.nodes import calibrations

router = APIRouter(prefix="/v1", tags=["calibrations"])


@router.get("/calibrations", operation_id="listCalibrations", summary="List calibrations", responses=secured())
def list_calibrations(services: ServicesDep, principal: Reader) -> CalibrationList:
    """Return every calibration, whether it is valid now, and the service's rate of false verdicts."""
    with services.store.read() as connection:
        items = read_noise(connection)
        ledger = calibrations.read_ledger(connection)
    return CalibrationList(items=items, ledger=ledger, statement=false_verdicts(ledger))


def read_noise(connection: Connection) -> list[CalibrationPublic]:
    """Return every calibration, and whether it is valid now."""
    return [_public(one) for one in calibrations.read_calibrations(connection)]


def _public(calibration: Calibration) -> CalibrationPublic:
    problem = next(standing_problems(calibration, time.time()), None)
    mended_by = mending_command(calibration.key.node_class, calibration.ablations[-1])
    return CalibrationPublic(calibration=calibration, problem=problem, mended_by=mended_by if problem else None)
