"""Routes that tell what can be asked for and what is there to run it."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path

from experiments.design.gate import GatePublic
from experiments.design.gates import catalogue
from experiments.design.problems import listed, nearest, shown
from experiments.design.spec import ablation_json_schema
from experiments.errors import SpecProblem
from experiments.records.messages import NodeRegistered, NodeRegistration
from kernels.backends import NODE_CLASSES
from service.deps import Reader, ServicesDep, Worker, json_only
from service.errors import Invalid
from service.responses import problems, secured
from service.schemas.nodes import NodeList
from service.serializers import node_public
from service.store import keys, node_states, nodes

router = APIRouter(prefix="/v1", tags=["catalogue"])

NODE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")


@router.get("/gates", operation_id="listGates", summary="List every gate", responses=secured())
def list_gates(principal: Reader) -> list[GatePublic]:
    """Return every gate with its values and the node classes that can run them."""
    return catalogue()


@router.get("/nodes", operation_id="listNodes", summary="List every node", responses=secured())
def list_nodes(services: ServicesDep, principal: Reader) -> NodeList:
    """Return every node that ever registered, with its health."""
    with services.store.read() as connection:
        rows = nodes.list_nodes(connection)
    return NodeList(items=[node_public(row, services.settings) for row in rows])


@router.put(
    "/nodes/{name}",
    operation_id="registerNode",
    summary="Register a node",
    tags=["workers"],
    dependencies=[Depends(json_only)],
    responses=secured(413, 415, 422),
)
def register_node(
    name: Annotated[str, Path(pattern=NODE_NAME.pattern)],
    registration: NodeRegistration,
    services: ServicesDep,
    principal: Worker,
) -> NodeRegistered:
    """Store what a worker found on its machine; the same name is the same node."""
    known = list(NODE_CLASSES)
    if registration.node_class not in known:
        detail = f"unknown node class {shown(registration.node_class)}; known: {listed(known)}"
        hint = nearest(registration.node_class, known)
        raise Invalid(problems=[SpecProblem(pointer="#/node_class", detail=detail, hint=hint)])
    if registration.public_key is None:
        detail = "a node that reports to a service signs its blocks; this one offers no key"
        raise Invalid(problems=[SpecProblem(pointer="#/public_key", detail=detail)])
    with services.store.write() as connection:
        keys.admit(connection, name, registration.public_key)
        node_id = nodes.register(connection, name, registration)
        node_states.note_device(connection, node_id, registration.device_state, registration.device_reason)
    return NodeRegistered(node_id=node_id, claim_poll_s=services.settings.claim_poll_s)


@router.get(
    "/schema/ablation.json",
    operation_id="getSpecSchema",
    summary="The JSON Schema of a spec",
    responses=problems(),
)
def get_spec_schema() -> dict[str, Any]:
    """Return the schema that editors and other tools check a spec file with."""
    return ablation_json_schema()
