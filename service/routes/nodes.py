"""Routes about nodes: list, register, drain and quarantine them, their API keys and their signing keys."""

import difflib
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Path
from sqlalchemy import Connection

from ablate.experiments.design.problems import shown
from ablate.experiments.errors import SpecProblem
from ablate.experiments.ids import ENROLMENT_NAME, NODE_NAME, REASON
from ablate.experiments.node_classes import NAMED_GPUS, NODE_CLASSES, is_gpu
from ablate.experiments.records.messages import Enrolment, NodeRegistered, NodeRegistration
from ablate.experiments.records.signing import KEY_PATTERN, PublicKey
from ablate.service.errors import Invalid
from ablate.service.http.deps import Enroller, Operator, Reader, Services, ServicesDep, Worker, json_only
from ablate.service.http.problems import check_known
from ablate.service.http.responses import secured
from ablate.service.http.serializers import key_public, node_public, silent_limit_s
from ablate.service.queue.waiting import demand
from ablate.service.schemas.nodes import KeyList, NodeList, NodePublic, WaitingList
from ablate.service.schemas.tokens import EnrolmentRequest, NodeKeyRequest, RevokeRequest, RotateRequest, TokenSecret
from ablate.service.settings import ServiceSettings
from ablate.service.store.access import enrolments, keys, tokens
from ablate.service.store.nodes import node_states, nodes

router = APIRouter(prefix="/v1", tags=["nodes"])

NodeName = Annotated[str, Path(pattern=NODE_NAME, examples=["gpu-7"])]
EnrolmentName = Annotated[str, Path(pattern=ENROLMENT_NAME, examples=["h200-5f0c2a"])]
Reason = Annotated[str, Body(embed=True, pattern=REASON, examples=["its fan is loud"])]
KeyPath = Annotated[PublicKey, Path(pattern=KEY_PATTERN)]
_NEAR = 0.85
"""Likeness of two names, of which one is a mistake: one letter of seven."""
KeyOwner = Annotated[str, Body(embed=True, pattern="^[ -~]{1,120}$", examples=["gpu-7"])]


@router.get("/nodes", operation_id="listNodes", summary="List every node", responses=secured())
def list_nodes(services: ServicesDep, principal: Reader) -> NodeList:
    """Return every node that ever registered, with its health, except those that left with their allocation."""
    return node_list(services)


def node_list(services: Services) -> NodeList:
    """Return every node in its current state."""
    with services.store.read() as connection:
        return NodeList(items=nodes_public(connection, services.settings))


def nodes_public(connection: Connection, settings: ServiceSettings) -> list[NodePublic]:
    """Return every node with its running blocks."""
    runs = nodes.running_on(connection)
    return [node_public(row, runs.get(row.id, []), settings) for row in nodes.list_nodes(connection)]


@router.get("/waiting", operation_id="listWaiting", summary="Say how much work waits", responses=secured())
def list_waiting(services: ServicesDep, principal: Reader) -> WaitingList:
    """Return the device minutes that wait, by node class and number of devices, so that a cluster starts workers."""
    with services.store.read() as connection:
        return WaitingList(items=demand(connection, silent_s=silent_limit_s(services.settings)))


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
    """Store a worker's description of its machine; the same name is the same node."""
    _check_class(registration.node_class)
    nodes.check_key(principal, name, registration.node_class)
    if registration.public_key is None:
        detail = "a node that reports to a service signs its blocks; this one offers no key"
        raise Invalid(problems=[SpecProblem(pointer="#/public_key", detail=detail)])
    silent_s = silent_limit_s(services.settings)
    with services.store.write() as connection:
        keys.admit(connection, name, registration.public_key)
        node_id = nodes.register(connection, name, registration, silent_s=silent_s)
        if registration.probed:
            node_states.end_probe(connection, node_id, registration.device_state, registration.device_reason)
        node_states.note_device(connection, node_id, registration.device_state, registration.device_reason)
    return NodeRegistered(node_id=node_id, claim_poll_s=services.settings.claim_poll_s)


def _check_class(name: str) -> None:
    """Raise Invalid unless `name` is in the table of node classes, or can be the name of another GPU."""
    if not is_gpu(name):
        check_known("node_class", name, list(NODE_CLASSES))


def _check_new_class(connection: Connection, name: str) -> None:
    """Raise Invalid for a GPU that nobody has here and whose name is nearly that of another: most likely a mistake."""
    classes = {*NODE_CLASSES, *NAMED_GPUS, *(kind.node_class for kind in nodes.kinds(connection))}
    near = [] if name in classes else difflib.get_close_matches(name, sorted(classes), n=1, cutoff=_NEAR)
    if near:
        detail = f"no machine of class {shown(name)} is known, and the name is nearly that of another class"
        hint = f"did you mean '{near[0]}'? For a GPU that is really called so: new_class, in the terminal --new-class"
        raise Invalid(problems=[SpecProblem(pointer="#/node_class", detail=detail, hint=hint)])


@router.post(
    "/nodes",
    operation_id="addNode",
    summary="Issue the key of a node",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(409, 413, 415, 422),
)
def add_node(wanted: NodeKeyRequest, services: ServicesDep, principal: Operator) -> TokenSecret:
    """Return a key that allows one worker to register as this node and to claim and report for it."""
    if wanted.node_class is not None:
        _check_class(wanted.node_class)
    token = tokens.node_token(wanted.name, wanted.node_class)
    with services.store.write() as connection:
        if wanted.node_class is not None and not wanted.new_class:
            _check_new_class(connection, wanted.node_class)
        secret = tokens.create(connection, token, by=principal.name)
    return TokenSecret(name=token.name, node=wanted.name, secret=secret)


@router.post(
    "/enrolments",
    operation_id="createEnrolment",
    summary="Create an enrolment token",
    status_code=HTTPStatus.CREATED,
    dependencies=[Depends(json_only)],
    responses=secured(413, 415, 422),
)
def create_enrolment(wanted: EnrolmentRequest, services: ServicesDep, principal: Operator) -> TokenSecret:
    """Return a secret with which workers of one class get keys of new nodes. `listTokens` lists it."""
    _check_class(wanted.node_class)
    with services.store.write() as connection:
        if not wanted.new_class:
            _check_new_class(connection, wanted.node_class)
        name, secret = enrolments.create(
            connection, wanted.node_class, uses=wanted.uses, lasts_s=wanted.lasts_s, by=principal.name
        )
    return TokenSecret(name=name, node=None, secret=secret)


@router.post(
    "/enrolments/{name:name}:revoke",
    operation_id="revokeEnrolment",
    summary="Revoke an enrolment token",
    status_code=HTTPStatus.NO_CONTENT,
    dependencies=[Depends(json_only)],
    responses=secured(404, 413, 415, 422),
)
def revoke_enrolment(name: EnrolmentName, wanted: RevokeRequest, services: ServicesDep, principal: Operator) -> None:
    """Let no other node enrol with this token. Nodes that did keep their keys."""
    with services.store.write() as connection:
        enrolments.revoke(connection, name, reason=wanted.reason)
    services.authenticator.forget()


@router.post(
    "/nodes/{name:name}:enrol",
    operation_id="enrolNode",
    summary="Enrol a node",
    tags=["workers"],
    status_code=HTTPStatus.NO_CONTENT,
    dependencies=[Depends(json_only)],
    responses=secured(409, 413, 415, 422),
)
def enrol_node(name: NodeName, wanted: Enrolment, services: ServicesDep, principal: Enroller) -> None:
    """Accept the key that a worker made, as that of a new node of the enrolment token's class."""
    with services.store.write() as connection:
        enrolments.enrol(connection, principal, name, wanted.node_class, wanted.key_digest)


@router.post(
    "/nodes/{name:name}:leave",
    operation_id="leaveNode",
    summary="Remove an enrolled node",
    tags=["workers"],
    status_code=HTTPStatus.NO_CONTENT,
    responses=secured(404, 422),
)
def leave_node(name: NodeName, services: ServicesDep, principal: Worker) -> None:
    """End the key of a node whose allocation ends; the node is no longer listed, and its results stay."""
    nodes.check_owner(name, principal)
    with services.store.write() as connection:
        nodes.leave(connection, name)
    services.authenticator.forget()


@router.post(
    "/nodes/{name:name}:rotate-key",
    operation_id="rotateNodeKey",
    summary="Replace the key of a node",
    dependencies=[Depends(json_only)],
    responses=secured(404, 409, 413, 415, 422),
)
def rotate_node_key(name: NodeName, wanted: RotateRequest, services: ServicesDep, principal: Operator) -> TokenSecret:
    """Return a new key; the old one stays valid for the grace period."""
    with services.store.write() as connection:
        secret = tokens.rotate(connection, tokens.key_name(name), grace_s=wanted.grace_s)
    services.authenticator.forget()
    return TokenSecret(name=tokens.key_name(name), node=name, secret=secret)


@router.post(
    "/nodes/{name:name}:end-old-keys",
    operation_id="endOldNodeKeys",
    summary="End the replaced keys of a node",
    status_code=HTTPStatus.NO_CONTENT,
    responses=secured(404, 409, 422),
)
def end_old_node_keys(name: NodeName, services: ServicesDep, principal: Operator) -> None:
    """End the grace period of old keys now."""
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
    """End every key of the node. Its running block returns to the queue when its lease expires.

    The node may be added again.
    """
    with services.store.write() as connection:
        tokens.revoke(connection, tokens.key_name(name), reason=wanted.reason)
    services.authenticator.forget()


@router.post("/nodes/{name:name}:drain", operation_id="drainNode", summary="Drain a node", responses=secured(404, 422))
def drain_node(name: NodeName, services: ServicesDep, principal: Operator) -> NodeList:
    """Let the node finish its block and give it no other until it is resumed."""
    with services.store.write() as connection:
        node_states.drain(connection, name, by=principal.name)
    return node_list(services)


@router.post(
    "/nodes/{name:name}:quarantine",
    operation_id="quarantineNode",
    summary="Quarantine a node",
    dependencies=[Depends(json_only)],
    responses=secured(404, 413, 415, 422),
)
def quarantine_node(name: NodeName, reason: Reason, services: ServicesDep, principal: Operator) -> NodeList:
    """Give the node no block until it is resumed; its running block goes on. People will read the reason."""
    with services.store.write() as connection:
        node_states.quarantine(connection, name, reason, by=principal.name)
    return node_list(services)


@router.post(
    "/nodes/{name:name}:resume", operation_id="resumeNode", summary="Resume a node", responses=secured(404, 422)
)
def resume_node(name: NodeName, services: ServicesDep, principal: Operator) -> NodeList:
    """Give the node work again; blocks that broke on it before no longer count against it."""
    with services.store.write() as connection:
        node_states.resume(connection, name)
    return node_list(services)


@router.get(
    "/keys",
    operation_id="listKeys",
    summary="List the keys of nodes",
    responses=secured(),
)
def list_keys(services: ServicesDep, principal: Reader) -> KeyList:
    """Return every key that was ever trusted, with its node, who trusted it, and whether it was revoked."""
    return _keys(services)


@router.post(
    "/keys/{key}:trust",
    operation_id="trustKey",
    summary="Trust a key for a node",
    dependencies=[Depends(json_only)],
    responses=secured(413, 415, 422),
)
def trust_key(key: KeyPath, node: KeyOwner, services: ServicesDep, principal: Operator) -> KeyList:
    """Accept this key's signatures for the node, in place of the node's other keys."""
    with services.store.write() as connection:
        keys.replace(connection, node, key, by=principal.name)
    return _keys(services)


@router.post(
    "/keys/{key}:revoke",
    operation_id="revokeKey",
    summary="Revoke a key",
    dependencies=[Depends(json_only)],
    responses=secured(404, 413, 415, 422),
)
def revoke_key(key: KeyPath, reason: Reason, services: ServicesDep, principal: Operator) -> KeyList:
    """Reject this key's signatures from now on; results accepted earlier stay."""
    with services.store.write() as connection:
        keys.revoke(connection, key, reason=reason)
    return _keys(services)


def _keys(services: Services) -> KeyList:
    with services.store.read() as connection:
        return KeyList(items=[key_public(row) for row in keys.list_keys(connection)])
