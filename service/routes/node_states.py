"""Routes with which operators stop nodes and let them go on."""

from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path

from service.http.deps import Operator, ServicesDep, json_only
from service.http.responses import secured
from service.routes.nodes import node_list
from service.schemas.nodes import NodeList
from service.schemas.tokens import NODE_NAME, REASON
from service.store.nodes import node_states

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])

NodeName = Annotated[str, Path(pattern=NODE_NAME, examples=["gpu-7"])]
Reason = Annotated[str, Body(embed=True, pattern=REASON, examples=["its fan is loud"])]


@router.post("/{name:name}:drain", operation_id="drainNode", summary="Drain a node", responses=secured(404, 422))
def drain_node(name: NodeName, services: ServicesDep, principal: Operator) -> NodeList:
    """Let the node finish the block that it runs, and give it no other until it is resumed."""
    with services.store.write() as connection:
        node_states.drain(connection, name, by=principal.name)
    return node_list(services)


@router.post(
    "/{name:name}:quarantine",
    operation_id="quarantineNode",
    summary="Quarantine a node",
    dependencies=[Depends(json_only)],
    responses=secured(404, 413, 415, 422),
)
def quarantine_node(name: NodeName, reason: Reason, services: ServicesDep, principal: Operator) -> NodeList:
    """Give the node no block until it is resumed, for a reason that people read; what it runs goes on."""
    with services.store.write() as connection:
        node_states.quarantine(connection, name, reason, by=principal.name)
    return node_list(services)


@router.post("/{name:name}:resume", operation_id="resumeNode", summary="Resume a node", responses=secured(404, 422))
def resume_node(name: NodeName, services: ServicesDep, principal: Operator) -> NodeList:
    """Give the node work again; what broke on it until now does not count against it any more."""
    with services.store.write() as connection:
        node_states.resume(connection, name)
    return node_list(services)
