"""Routes about nodes: what is there, who registers, and the key that each of them has."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from sqlalchemy import Connection

from experiments.design.problems import listed, nearest, shown
from experiments.errors import SpecProblem
from experiments.records.messages import NodeRegistered, NodeRegistration
from kernels.backends import NODE_CLASSES
from service.errors import Invalid
from service.http.deps import Operator, Reader, Services, ServicesDep, Worker, json_only
from service.http.responses import secured
from service.http.serializers import node_public, silent_limit_s
from service.schemas.nodes import NodeList, NodePublic
from service.schemas.tokens import NODE_NAME, NodeKeyRequest, RevokeRequest, RotateRequest, TokenSecret
from service.settings import ServiceSettings
from service.store.access import keys, tokens
from service.store.nodes import node_states, nodes

router = APIRouter(prefix="/v1", tags=["nodes"])

NodeName = Annotated[str, Path(pattern=NODE_NAME)]


@router.get("/nodes", operation_id="listNodes", summary="List every node", responses=secured())
def list_nodes(services: ServicesDep, principal: Reader) -> NodeList:
    """Return every node that ever registered, with its health."""
    return node_list(services)


def node_list(services: Services) -> NodeList:
    """Return every node as it is now."""
    with services.store.read() as connection:
        return NodeList(items=nodes_public(connection, services.settings))


def nodes_public(connection: Connection, settings: ServiceSettings) -> list[NodePublic]:
    """Return every node with what it runs."""
    runs = nodes.running_on(connection)
    return [node_public(row, runs.get(row.id, []), settings) for row in nodes.list_nodes(connection)]


@router.put(
    "/nodes/{name:word}",
    operation_id="registerNode",
    summary="Register a node",
    tags=["workers"],
    dependencies=[Depends(json_only)],
    responses=secured(409, 413, 415, 422),
)
def register_node(
    name: NodeName, registration: NodeRegistration, services: ServicesDep, principal: Worker
) -> NodeRegistered:
    """Store what a worker found on its machine; the same name is the same node."""
    _check_class(registration.node_class)
    nodes.check_key(principal, name, registration.node_class)
    if registration.public_key is None:
        detail = "a node that reports to a service signs its blocks; this one offers no key"
        raise Invalid(problems=[SpecProblem(pointer="#/public_key", detail=detail)])
    silent_s = silent_limit_s(services.settings)
    with services.store.write() as connection:
        keys.admit(connection, name, registration.public_key)
        node_id = nodes.register(connection, name, registration, silent_s=silent_s)
        node_states.note_device(connection, node_id, registration.device_state, registration.device_reason)
    return NodeRegistered(node_id=node_id, claim_poll_s=services.settings.claim_poll_s)


def _check_class(node_class: str) -> None:
    known = list(NODE_CLASSES)
    if node_class not in known:
        detail = f"unknown node class {shown(node_class)}; known: {listed(known)}"
        raise Invalid(problems=[SpecProblem(pointer="#/node_class", detail=detail, hint=nearest(node_class, known))])


@router.post(
    "/nodes",
    operation_id="addNode",
    summary="Issue the key of a node",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(409, 413, 415, 422),
)
def add_node(wanted: NodeKeyRequest, services: ServicesDep, principal: Operator) -> TokenSecret:
    """Return the key with which one worker registers as this node, claims and reports for it, and does nothing else."""
    if wanted.node_class is not None:
        _check_class(wanted.node_class)
    token = tokens.node_token(wanted.name, wanted.node_class)
    with services.store.write() as connection:
        secret = tokens.create(connection, token, by=principal.name)
    return TokenSecret(name=token.name, node=wanted.name, secret=secret)


@router.post(
    "/nodes/{name:name}:rotate-key",
    operation_id="rotateNodeKey",
    summary="Replace the key of a node",
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def rotate_node_key(name: NodeName, wanted: RotateRequest, services: ServicesDep, principal: Operator) -> TokenSecret:
    """Return a fresh key; the one before it counts until the grace is over."""
    with services.store.write() as connection:
        secret = tokens.rotate(connection, tokens.key_name(name), grace_s=wanted.grace_s)
    services.authenticator.forget()
    return TokenSecret(name=tokens.key_name(name), node=name, secret=secret)


@router.post(
    "/nodes/{name:name}:end-old-keys",
    operation_id="endOldNodeKeys",
    summary="End the keys of a node that were replaced",
    status_code=HTTPStatus.NO_CONTENT,
    responses=secured(404, 409, 422),
)
def end_old_node_keys(name: NodeName, services: ServicesDep, principal: Operator) -> None:
    """Let the newest key count alone, before the grace is over."""
    with services.store.write() as connection:
        tokens.end_old_secrets(connection, tokens.key_name(name))
    services.authenticator.forget()


@router.post(
    "/nodes/{name:name}:revoke-key",
    operation_id="revokeNodeKey",
    summary="Revoke the key of a node",
    status_code=HTTPStatus.NO_CONTENT,
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def revoke_node_key(name: NodeName, wanted: RevokeRequest, services: ServicesDep, principal: Operator) -> None:
    """End every key of the node; a block that it holds goes back when its lease runs out. It may be added again."""
    with services.store.write() as connection:
        tokens.revoke(connection, tokens.key_name(name), reason=wanted.reason)
    services.authenticator.forget()
