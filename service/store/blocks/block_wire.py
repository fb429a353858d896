"""Claimed blocks for workers, and the checks of their reports and signatures; nothing here runs in a transaction."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cachetools import LRUCache, cached
from sqlalchemy import bindparam, select

from ablate.experiments.design.metrics import find_metric
from ablate.experiments.design.plan import Plan
from ablate.experiments.digest import canonical_json, digest
from ablate.experiments.errors import SpecProblem
from ablate.experiments.outcomes import BASELINE, Outcome
from ablate.experiments.records import identity
from ablate.experiments.records.identity import (
    UNFENCED,
    UNLIMITED_S,
    AttemptLease,
    BlockIds,
    BlockReport,
    ClaimedBlock,
    PlannedWork,
    claimed_fields,
    mismatches,
)
from ablate.experiments.records.receipt_check import checked
from ablate.experiments.records.receipts import Receipt, read_metric
from ablate.experiments.records.signing import Signature, signature_problem
from ablate.experiments.reporting import wording
from ablate.service.errors import Invalid
from ablate.service.store.access import keys
from ablate.service.store.blocks.attempts import breaks_of, find_attempt
from ablate.service.store.blocks.claims import MEAN_S
from ablate.service.store.blocks.reports import VerifiedReceipt
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, attempts, blocks, storable, trials

_CLAIMED = (
    select(
        trials.c.id.label("trial_id"),
        attempts.c.id,
        attempts.c.number,
        attempts.c.token,
        blocks.c.id.label("block_id"),
        blocks.c["index"].label("block_index"),
        ablations.c.id.label("ablation_id"),
        ablations.c.trial_timeout_s,
        ablations.c.request_id,
        MEAN_S.label("expected_s"),
    )
    .join_from(attempts, blocks, blocks.c.id == attempts.c.block_id)
    .join(ablations, ablations.c.id == blocks.c.ablation_id)
    .join(trials, trials.c.block_id == blocks.c.id)
    .where(attempts.c.id == bindparam("attempt"))
    .order_by(trials.c.position)
)
_KEPT_PLANS = 64
_MOST_DIFFERENCES = 8
"""Arms of a block that its reason names."""


@cached(LRUCache(_KEPT_PLANS), condition=threading.Condition())
def plan_of(store: Store, ablation_id: str) -> Plan:
    """Return the plan of an ablation, from a cache: plans never change, and a large one takes long to parse.

    Concurrent callers wait for one read of the same plan.
    """
    with store.read() as connection:
        text = connection.execute(select(ablations.c.plan).where(ablations.c.id == ablation_id)).scalar_one()
    return Plan.model_validate_json(text)


def differences_text(deciding: str, receipts: Sequence[Receipt]) -> str:
    """Say how the arms of a block differ from its baseline in the metric of this name.

    One block is a look and no verdict. Empty without a measured baseline, and for metrics that no trial has alone.
    """
    by_arm = {one.arm: one for one in receipts if one.outcome is Outcome.MEASURED}
    base = by_arm.pop(BASELINE, None)
    metric = None if base is None else find_metric(deciding, base.config.declared)
    other = None if base is None or metric is None else read_metric(metric, base)
    if metric is None or other is None:
        return ""
    parts = []
    for arm, receipt in by_arm.items():
        own = read_metric(metric, receipt)
        if own is not None and metric.kind == "loss":
            parts.append(f"{arm} {wording.signed(own - other, 4)} {metric.unit}")
        elif own is not None and own > 0 < other:
            parts.append(f"{arm} {wording.percent(100 * (own / other - 1))}")
    more = len(parts) - _MOST_DIFFERENCES
    shown = [*parts[:_MOST_DIFFERENCES], *([f"{more} more"] if more > 0 else [])]
    return f"{metric.label}: {', '.join(shown)}".replace(wording.SPACE, " ") if shown else ""


def claimed_block(
    store: Store, attempt_id: str, *, lease_s: float = UNLIMITED_S, heartbeat_s: float = UNLIMITED_S
) -> ClaimedBlock:
    """Return the block of an attempt as its worker receives it."""
    with store.read() as connection:
        rows = connection.execute(_CLAIMED, {"attempt": attempt_id}).all()
        row = rows[0]
        broken = breaks_of(connection, row.ablation_id)
    ids = BlockIds(block_id=row.block_id, trial_ids=tuple(one.trial_id for one in rows))
    lease = AttemptLease(
        attempt_id=row.id,
        attempt_no=row.number,
        token=row.token or UNFENCED,
        lease_s=lease_s,
        heartbeat_s=heartbeat_s,
    )
    work = PlannedWork(
        ablation_id=row.ablation_id,
        block_index=row.block_index,
        timeout_s=row.trial_timeout_s,
        broken=broken,
        request_id=row.request_id,
        expected_s=row.expected_s,
    )
    return identity.claimed_block(plan_of(store, row.ablation_id), ids, work, lease)


def report_digest(report: BlockReport) -> str:
    """Return the digest that identifies a repeated report; log text is not part of it."""
    return digest(report.model_dump(mode="json", exclude={"logs"}))


def verify_report(store: Store, attempt_id: str, report: BlockReport) -> list[Receipt]:
    """Verify every receipt against its digest and the attempt, and return them. Raises Invalid with all problems."""
    with store.read() as connection:
        node_id = find_attempt(connection, attempt_id).node_id
    claimed = claimed_block(store, attempt_id)
    expected = {trial.trial_id: claimed_fields(claimed, trial, node_id=node_id) for trial in claimed.trials}
    receipts = list(map(checked, report.receipts))
    problems = list(_problems(report, expected, [faults for _receipt, faults in receipts]))
    if problems:
        raise Invalid("the report does not fit the block that was claimed", problems=problems)
    return [receipt for receipt, _faults in receipts if receipt is not None]


def _problems(
    report: BlockReport, expected: dict[str, dict[str, Any]], faults: Sequence[Sequence[str]]
) -> Iterator[SpecProblem]:
    seen: set[str] = set()
    for number, receipt in enumerate(report.receipts):
        where = f"#/receipts/{number}"
        ids = receipt.get("ids")
        trial_id = str(ids.get("trial")) if isinstance(ids, Mapping) else ""
        if trial_id not in expected or trial_id in seen:
            yield SpecProblem(pointer=f"{where}/ids/trial", detail=f"{trial_id!r} is not an open trial of this block")
            continue
        seen.add(trial_id)
        for path, detail in mismatches(receipt, expected[trial_id]):
            yield SpecProblem(pointer=f"{where}/{path}", detail=detail)
        for fault in faults[number]:
            yield SpecProblem(pointer=where, detail=fault)
    for trial_id in sorted(set(expected) - seen):
        yield SpecProblem(pointer="#/receipts", detail=f"no receipt for trial {trial_id}", hint="report a block whole")


def verified(receipt: Receipt) -> VerifiedReceipt:
    """Convert a verified receipt for the store."""
    failure = f"{receipt.failure_class or receipt.outcome}: {receipt.message or 'no reason given'}"
    return VerifiedReceipt(
        trial_id=receipt.ids.trial,
        outcome=receipt.outcome,
        failure=None if receipt.outcome is Outcome.MEASURED else storable(failure),
        arm_digest=receipt.digests.arm,
        wall_s=receipt.wall_s,
        digest=receipt.digest,
        payload=canonical_json(receipt.model_dump(mode="json")),
    )


def checked_signature(store: Store, attempt_id: str, report: BlockReport) -> Signature:
    """Return the signature of the attempt's node. Raises Invalid unless it fits this report."""
    with store.read() as connection:
        node, key = keys.key_of_attempt(connection, attempt_id)
        refused = None if key is None else keys.refusal(connection, node, key)
    if refused is not None:
        raise _unsigned_report(f"key {key} {refused}")
    signature = report.signature
    if signature is None or signature.key != key:
        signer = "nobody" if signature is None else signature.key
        raise _unsigned_report(f"is by {signer}; the node that holds this attempt registered {key or 'no key'}")
    problem = signature_problem(signature, report.statement(claimed_block(store, attempt_id)))
    if problem is not None:
        raise _unsigned_report(problem)
    return signature


def _unsigned_report(problem: str) -> Invalid:
    return Invalid(
        "the report is not signed by its node", problems=[SpecProblem(pointer="#/signature", detail=problem)]
    )
