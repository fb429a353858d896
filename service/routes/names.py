"""The route that finds an ablation by what people call it."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from experiments.ids import CALLED_PATTERN
from service.http.deps import Reader, ServicesDep
from service.http.responses import document, secured
from service.routes.ablations import load
from service.schemas.ablations import AblationPublic
from service.store.ablations.names import find_ablation

router = APIRouter(prefix="/v1", tags=["ablations"])

CalledName = Annotated[
    str,
    Query(
        pattern=CALLED_PATTERN,
        description="A name, an id, a beginning that only one of them has, or `latest`. A name means its newest.",
        examples=["psiv-cache"],
    ),
]


@router.get(
    "/ablations:find",
    operation_id="findAblation",
    summary="Find an ablation by what people call it",
    response_model=AblationPublic,
    responses={**secured(404, 409, 422), 304: {"description": "The client has this already (If-None-Match)."}},
)
def find(request: Request, name: CalledName, services: ServicesDep, principal: Reader) -> Response:
    """Return the ablation that is called so."""
    with services.store.read() as connection:
        ablation_id = find_ablation(connection, name)
    return document(request, load(services, ablation_id))
