"""The route about the baselines of a recipe over time."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from experiments.analysis.noise.history import history_of
from experiments.analysis.noise.history_series import HistorySeries
from experiments.design.metrics import METRIC_LABELS, METRICS
from experiments.design.recipes import RECIPES
from service.http.deps import Reader, ServicesDep
from service.http.problems import check_known
from service.http.responses import secured
from service.store.ablations.history import baseline_runs

router = APIRouter(prefix="/v1", tags=["ablations"])


@router.get(
    "/history/{recipe}",
    operation_id="getHistory",
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
    check_known("recipe", recipe, list(RECIPES))
    check_known("metric", metric, list(METRICS), METRIC_LABELS)
    with services.store.read() as connection:
        runs = baseline_runs(connection, recipe, node_class=node_class)
    return history_of(metric, runs)
