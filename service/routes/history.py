"""Routes about past measurements: the baselines of a recipe over time, and the noise of the nodes."""

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query
from sqlalchemy import Connection

from ablate.experiments.analysis.noise.admission import mending_command, standing_problems
from ablate.experiments.analysis.noise.history import history_of
from ablate.experiments.analysis.noise.history_series import HistorySeries
from ablate.experiments.design.metrics import METRIC_LABELS, METRICS, is_declarable
from ablate.experiments.design.packages import recipe_names
from ablate.experiments.design.workload import COMMAND
from ablate.experiments.records.calibration import Calibration
from ablate.experiments.reporting.wording import false_verdicts
from ablate.service.http.deps import Reader, ServicesDep
from ablate.service.http.problems import check_known
from ablate.service.http.responses import secured
from ablate.service.schemas.nodes import CalibrationList, CalibrationPublic
from ablate.service.store.nodes import calibrations
from ablate.service.store.questions.history import baseline_runs

router = APIRouter(prefix="/v1")


@router.get(
    "/history/{recipe}",
    operation_id="getHistory",
    tags=["ablations"],
    summary="The baseline of a recipe over time",
    responses=secured(422),
)
def get_history(
    recipe: Annotated[str, Path(examples=["hybrid-tiny"])],
    services: ServicesDep,
    principal: Reader,
    metric: Annotated[str, Query(description="A metric of receipts.")] = "tokens_per_s",
    node_class: Annotated[str | None, Query(description="Only this node class.")] = None,
) -> list[HistorySeries]:
    """Return a series for every baseline configuration and device, with changes of its level and its anchor."""
    check_known("recipe", recipe, [*recipe_names(), COMMAND])
    if recipe != COMMAND or not is_declarable(metric):
        check_known("metric", metric, list(METRICS), METRIC_LABELS)
    with services.store.read() as connection:
        runs = baseline_runs(connection, recipe, node_class=node_class)
    return history_of(metric, runs)


@router.get(
    "/calibrations",
    operation_id="listCalibrations",
    tags=["calibrations"],
    summary="List calibrations",
    responses=secured(),
)
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
