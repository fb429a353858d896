"""The route that changes an ablation's place in the queue."""

from fastapi import APIRouter, Depends

from service.http.deps import AblationId, ServicesDep, Submitter, json_only
from service.http.responses import secured
from service.routes.ablations import load
from service.schemas.ablations import AblationPublic, PriorityChange
from service.store.access import tokens
from service.store.blocks import turns

router = APIRouter(prefix="/v1/ablations", tags=["ablations"])


@router.patch(
    "/{ablation_id:word}",
    operation_id="setPriority",
    summary="Change the priority of an ablation",
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def set_priority(
    ablation_id: AblationId, change: PriorityChange, services: ServicesDep, principal: Submitter
) -> AblationPublic:
    """Move the blocks that are not over to another priority; those that run go on, and keep it if they break."""
    with services.store.write() as connection:
        tokens.check_owner(connection, principal, ablation_id)
        turns.set_priority(connection, ablation_id, change.priority, actor=principal.name)
    return load(services, ablation_id)
