"""Import an ablation that ran without a service: store its bundles in one transaction, through the same moves.

Afterwards no block is queued. It is done, it failed, or it is cancelled because no bundle contains it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from ablate.experiments.outcomes import AblationState, AttemptState, BlockState, TrialState
from ablate.experiments.records.bundle import Attempt, BrokenAttempt, Bundle, BundledBlock, NodeRecord, used_up_by
from ablate.experiments.records.messages import LogChunk
from ablate.service.lifecycle import EventKind
from ablate.service.store.ablations.submissions import Submission, insert_rows
from ablate.service.store.access import keys
from ablate.service.store.blocks import reports
from ablate.service.store.blocks.attempts import lock_block
from ablate.service.store.blocks.completion import cancel_blocks, complete_if_done, lock_waiting
from ablate.service.store.blocks.reports import VerifiedReceipt
from ablate.service.store.blocks.transitions import Transitions
from ablate.service.store.files import logs
from ablate.service.store.tables import ablations, attempts, blocks, db_now, nodes, storable

_MISSING = "the imported bundles do not hold every block"


@dataclass(frozen=True, kw_only=True)
class Import:
    """Verified bundles on their way into the store."""

    bundle: Bundle
    submission: Submission
    receipts: dict[int, list[VerifiedReceipt]]
    """By block index."""
    trusted: tuple[str, ...] = ()
    """Node keys that the importer decided to trust."""

    @property
    def bundles(self) -> str:
        """The digests of the bundles, as the ablation stores them."""
        return json.dumps(self.bundle.digests)


def known_bundles(connection: Connection, ablation_id: str) -> tuple[bool, str | None]:
    """Return whether the ablation is stored, and the digests of the bundles that it was imported from."""
    row = connection.execute(select(ablations.c.bundles).where(ablations.c.id == ablation_id)).first()
    return row is not None, None if row is None else row.bundles


def store_import(connection: Connection, imported: Import) -> None:
    """Insert everything, end the ablation and ask for its verdict.

    Raises IntegrityError if an ablation of this id is stored.
    """
    bundle, ablation_id = imported.bundle, imported.submission.ablation_id
    file = bundle.plan_file
    insert_rows(connection, imported.submission, file.blocks, bundles=imported.bundles)
    transitions = Transitions(connection, ablation_id, actor=imported.submission.submitted_by)
    counted = f"{len(bundle.blocks)} of {len(file.plan.blocks)} blocks"
    reason = f"imported: {counted} from {', '.join(digest[:19] for digest in bundle.digests)}"
    transitions.add_event(EventKind.ABLATION_STATE, ablation_id, reason=reason, new=AblationState.QUEUED)
    transitions.flush()
    _add_nodes(connection, bundle)
    _trust(connection, imported)
    for attempt in (*bundle.broken, *(block.attempt for block in bundle.blocks)):
        _insert_attempt(connection, imported, attempt)
    for record in bundle.broken:
        _break(transitions, record)
    running = AblationState.RUNNING
    transitions.move([ablation_id], AblationState.QUEUED, running, reason="imported", started_at=db_now())
    _end_missing(connection, transitions, bundle)
    for block in bundle.blocks:
        _begin(transitions, block.attempt, file.blocks[block.attempt.index].block_id)
    transitions.flush()
    for block in bundle.blocks:
        _finish(connection, imported, block)
    complete_if_done(connection, ablation_id)


def _add_nodes(connection: Connection, bundle: Bundle) -> None:
    all_attempts: Sequence[Attempt] = [*(block.attempt for block in bundle.blocks), *bundle.broken]
    for node in bundle.nodes.values():
        if connection.scalar(select(nodes.c.id).where(nodes.c.id == node.node_id)) is None:
            ends = (one.ended_at.timestamp() for one in all_attempts if one.node_id == node.node_id)
            seen = max(ends, default=0.0)
            connection.execute(insert(nodes).values(**_node_row(node), registered_at=seen, seen_at=seen))


def _trust(connection: Connection, imported: Import) -> None:
    for node in imported.bundle.nodes.values():
        if node.registration.public_key in imported.trusted:
            keys.trust(connection, node.name, node.registration.public_key, by=imported.submission.submitted_by)


def _node_row(node: NodeRecord) -> dict[str, str]:
    return {
        "id": node.node_id,
        "name": node.name[:80] + keys.imported_suffix(node.node_id),
        "node_class": node.registration.node_class[:32],
        "registration": node.registration.model_dump_json(),
    }


def _insert_attempt(connection: Connection, imported: Import, attempt: Attempt) -> None:
    file = imported.bundle.plan_file
    connection.execute(
        insert(attempts).values(
            id=attempt.attempt_id,
            block_id=file.blocks[attempt.index].block_id,
            ablation_id=file.ablation_id,
            number=attempt.attempt_no,
            node_id=attempt.node_id,
            state=AttemptState.RUNNING,
            started_at=attempt.started_at.timestamp(),
            ended_at=attempt.ended_at.timestamp(),
            signed_by=imported.bundle.signed_as.get(attempt.node_id),
        )
    )


def _break(transitions: Transitions, record: BrokenAttempt) -> None:
    """End a stored attempt as broken; its block stays queued."""
    message = storable(record.message)
    transitions.move(
        [record.attempt_id],
        AttemptState.RUNNING,
        AttemptState.BROKEN,
        reason=f"{record.failure_class}: {message}",
        failure_class=record.failure_class,
        arm=record.arm,
        message=message,
    )


def _begin(transitions: Transitions, attempt: Attempt, block_id: str) -> None:
    """Let the stored attempt that finished a block run it."""
    transitions.move(
        [block_id],
        BlockState.QUEUED,
        BlockState.RUNNING,
        reason=f"imported, attempt {attempt.attempt_no}",
        attempt_no=attempt.attempt_no,
        attempt_id=attempt.attempt_id,
        node_id=attempt.node_id,
        started_at=attempt.started_at.timestamp(),
    )


def _end_missing(connection: Connection, transitions: Transitions, bundle: Bundle) -> None:
    file = bundle.plan_file
    waiting = {row.id: row for row in lock_waiting(connection, file.ablation_id, wait=True)}
    absent = []
    for index in bundle.missing:
        last = used_up_by(bundle.broken, index)
        if last is None:
            absent.append(waiting[file.blocks[index].block_id])
        else:
            _fail(transitions, file.blocks[index].block_id, file.blocks[index].trial_ids, last)
    cancel_blocks(connection, transitions, file.ablation_id, absent, reason=_MISSING)


def _fail(transitions: Transitions, block_id: str, trial_ids: Sequence[str], last: BrokenAttempt) -> None:
    reason = storable(f"{last.failure_class}: {last.message} (attempt {last.attempt_no})")
    transitions.move(trial_ids, TrialState.QUEUED, TrialState.FAILED, reason=reason)
    running = {"attempt_no": last.attempt_no, "started_at": last.started_at.timestamp(), "node_id": last.node_id}
    transitions.move([block_id], BlockState.QUEUED, BlockState.RUNNING, reason="imported", **running)
    ended = {"finished_at": last.ended_at.timestamp(), "message": reason}
    transitions.move([block_id], BlockState.RUNNING, BlockState.FAILED, reason=reason, **ended)


def _finish(connection: Connection, imported: Import, block: BundledBlock) -> None:
    """Store a block's logs and receipts like a worker's report, then the time at which it really ended."""
    attempt = block.attempt
    locked = lock_block(connection, attempt.attempt_id)
    logs.append(
        connection, locked, [LogChunk(trial_id=t.trial_id, offset=0, text=t.log) for t in block.trials if t.log]
    )
    verified = imported.receipts[attempt.index]
    reports.store_block(connection, locked, verified, report_digest=imported.bundle.digests[0])
    ended_at = attempt.ended_at.timestamp()
    connection.execute(update(blocks).where(blocks.c.id == locked.block.id).values(finished_at=ended_at))
