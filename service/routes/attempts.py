"""Routes for workers: claim a block, renew its lease, report it."""

from http import HTTPStatus

from fastapi import APIRouter, Depends, Response

from ablate.experiments.outcomes import BlockState, FailureClass
from ablate.experiments.records.identity import BlockReport, ClaimedBlock
from ablate.experiments.records.messages import ClaimRequest, Heartbeat, HeartbeatReply, ProbeOrder
from ablate.service.errors import StaleToken
from ablate.service.http.deps import AttemptId, Services, ServicesDep, Worker, WorkerRoute, json_only
from ablate.service.http.responses import secured
from ablate.service.schemas.nodes import AttemptClosed
from ablate.service.store.ablations import results
from ablate.service.store.access import keys
from ablate.service.store.blocks import attempts, claims, reports
from ablate.service.store.blocks.block_wire import (
    checked_signature,
    claimed_block,
    differences_text,
    report_digest,
    verified,
    verify_report,
)
from ablate.service.store.files import logs
from ablate.service.store.nodes import node_states, nodes

router = APIRouter(prefix="/v1", tags=["workers"], dependencies=[Depends(json_only)], route_class=WorkerRoute)


@router.post(
    "/blocks:claim",
    operation_id="claimBlock",
    summary="Claim the next block",
    response_model=ClaimedBlock,
    responses={
        202: {"description": "The node is quarantined and is to probe itself now.", "model": ProbeOrder},
        204: {"description": "No waiting block that this node can run, or the node is stopped."},
        **secured(404, 409, 413, 415, 422),
    },
)
def claim_block(wanted: ClaimRequest, services: ServicesDep, principal: Worker) -> Response:
    """Assign the node the next block in turn that it can run in its time; none while the node is stopped.

    A claim with the id of the claim of a running attempt returns that attempt again.
    """
    settings = services.settings
    with services.store.write() as connection:
        node = nodes.mark_seen(connection, wanted.node_id, owner=principal.node, left_s=wanted.left_s)
        is_well = node_states.note_device(connection, node.id, wanted.device_state, wanted.device_reason)
        attempt_id = claims.claim_block(
            connection,
            node,
            lease_s=settings.lease_s,
            claim_id=wanted.claim_id,
            is_well=is_well,
            left_s=wanted.left_s,
        )
        probes = attempt_id is None and node_states.begin_probe(connection, node)
    if probes:
        return Response(ProbeOrder().model_dump_json(), HTTPStatus.ACCEPTED, media_type="application/json")
    if attempt_id is None:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    block = claimed_block(services.store, attempt_id, lease_s=settings.lease_s, heartbeat_s=settings.heartbeat_s)
    return Response(block.model_dump_json(), media_type="application/json")


@router.post(
    "/attempts/{attempt_id}:heartbeat",
    operation_id="heartbeat",
    summary="Renew a lease, and send progress and log text",
    responses=secured(404, 409, 413, 415, 422),
)
def heartbeat(attempt_id: AttemptId, beat: Heartbeat, services: ServicesDep, principal: Worker) -> HeartbeatReply:
    """Extend the lease of an attempt that still owns its block."""
    with services.store.write() as connection:
        node_id = nodes.mark_attempt_seen(connection, attempt_id, owner=principal.node)
        node_states.note_device(connection, node_id, beat.device_state, beat.device_reason)
        locked = attempts.lock_attempt(connection, attempt_id, beat.token)
        logs.append(connection, locked, beat.logs)
        attempts.store_waiting(connection, locked, beat.waits_for)
        attempts.store_progress(connection, locked, beat.progress)
        cancel, lease_s = attempts.renew_lease(connection, locked, lease_s=services.settings.lease_s)
    return HeartbeatReply(lease_s=lease_s, cancel=cancel)


@router.post(
    "/attempts/{attempt_id}:report",
    operation_id="reportBlock",
    summary="Report a block",
    responses=secured(404, 409, 413, 415, 422),
)
def report_block(attempt_id: AttemptId, report: BlockReport, services: ServicesDep, principal: Worker) -> AttemptClosed:
    """Store the receipts of a whole block, or why it has none. Repeating a report changes nothing."""
    digest = report_digest(report)
    with services.store.read() as connection:
        nodes.node_of_attempt(connection, attempt_id, owner=principal.node)
    try:
        return _store_report(attempt_id, report, services, digest)
    except StaleToken:
        with services.store.read() as connection:
            if not reports.was_reported(connection, attempt_id, report.token, digest):
                raise
            block = attempts.block_of(connection, attempts.find_attempt(connection, attempt_id))
    return AttemptClosed(attempt_id=attempt_id, block_id=block.id, block_state=BlockState(block.state))


def _store_report(attempt_id: str, report: BlockReport, services: Services, digest: str) -> AttemptClosed:
    """Verify and store a report. Raises StaleToken if it comes too late, or is stored already."""
    with services.store.read() as connection:
        reports.check_wanted(connection, attempt_id, report.token, has_result=report.failure_class is None)
    signature = checked_signature(services.store, attempt_id, report)
    receipts = [] if report.failure_class else verify_report(services.store, attempt_id, report)
    deciding = results.deciding_metric(services.store, receipts[0].ids.ablation) if receipts else ""
    differences = differences_text(deciding, receipts)
    with services.store.write() as connection:
        lock = attempts.lock_attempt if report.failure_class else reports.lock_wanted
        locked = lock(connection, attempt_id, report.token)
        logs.append(connection, locked, report.logs)
        if report.failure_class is None:
            rows = list(map(verified, receipts))
            state = reports.store_block(connection, locked, rows, report_digest=digest, differences=differences)
        else:
            state = reports.store_break(connection, locked, report, report_digest=digest)
        keys.store_signature(connection, attempt_id, signature)
    if report.failure_class is not None:
        _judge_node(services, locked.attempt.node_id, report.failure_class)
    services.wakes.notify()
    return AttemptClosed(attempt_id=attempt_id, block_id=locked.block.id, block_state=state)


def _judge_node(services: Services, node_id: str, failure: FailureClass) -> None:
    """Quarantine a node that broke too often, in a new transaction because nodes are locked before blocks."""
    if not failure.rule.speaks_against_node:
        return
    with services.store.write() as connection:
        node_states.judge_node(connection, node_id, limit=services.settings.node_breaks)
