"""Between wire and store for workers: what a claimed block looks like, and whether a report is what was asked for.

Nothing here runs inside a transaction.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import select

from experiments.design.arms import Arm
from experiments.design.plan import Plan
from experiments.digest import canonical_json, digest
from experiments.errors import SpecProblem
from experiments.records.chain import mismatches, read_path
from experiments.records.messages import BlockReport, ClaimedBlock, claimed_trials
from experiments.records.receipts import verify
from service.errors import Invalid
from service.store.attempts import find_attempt
from service.store.claims import Claim
from service.store.reports import VerifiedReceipt
from service.store.session import Store
from service.store.tables import ablations, attempts, blocks, trials


@lru_cache(maxsize=64)
def _arms(plan_json: str) -> Mapping[str, Arm]:
    return {arm.name: arm for arm in Plan.model_validate_json(plan_json).arms}


def _arms_of(store: Store, ablation_id: str) -> Mapping[str, Arm]:
    with store.read() as connection:
        return _arms(connection.execute(select(ablations.c.plan).where(ablations.c.id == ablation_id)).scalar_one())


def claimed_block(store: Store, claim: Claim, *, lease_s: float, heartbeat_s: float) -> ClaimedBlock:
    """Build what the worker needs to run the block."""
    block, ablation = claim.block, claim.ablation
    fields = block._mapping
    order: list[str] = json.loads(fields["order"])
    return ClaimedBlock(
        attempt_id=claim.attempt_id,
        token=claim.token,
        attempt_no=claim.attempt_no,
        lease_s=lease_s,
        heartbeat_s=heartbeat_s,
        ablation_id=ablation.id,
        ablation_name=ablation.name,
        block_id=block.id,
        block_index=fields["index"],
        seed=block.seed,
        spec_digest=ablation.spec_digest,
        rule_digest=ablation.rule_digest,
        trials=claimed_trials(
            _arms_of(store, ablation.id),
            order=order,
            trial_ids=[claim.trial_ids[name] for name in order],
            seed=block.seed,
            timeout_s=ablation.trial_timeout_s,
        ),
    )


def report_digest(report: BlockReport) -> str:
    """Return the digest by which a repeated report is recognised; log text does not count."""
    return digest(report.model_dump(mode="json", exclude={"logs"}))


def verify_report(store: Store, attempt_id: str, report: BlockReport) -> list[VerifiedReceipt]:
    """Check every receipt against its own digest and against the attempt. Raises Invalid with every problem found."""
    expected = _expected(store, attempt_id)
    problems = list(_problems(report, expected))
    if problems:
        raise Invalid("the report does not fit the block that was claimed", problems=problems)
    return [verified(dict(receipt)) for receipt in report.receipts]


def _expected(store: Store, attempt_id: str) -> dict[str, dict[str, Any]]:
    query = (
        select(trials, blocks.c.seed, ablations.c.spec_digest, ablations.c.rule_digest, ablations.c.plan)
        .join(blocks, blocks.c.id == trials.c.block_id)
        .join(ablations, ablations.c.id == trials.c.ablation_id)
        .join(attempts, attempts.c.block_id == blocks.c.id)
        .where(attempts.c.id == attempt_id)
    )
    with store.read() as connection:
        attempt = find_attempt(connection, attempt_id)
        rows = connection.execute(query).all()
    return {
        row.id: {
            "ids/ablation": row.ablation_id,
            "ids/block": row.block_id,
            "ids/block_index": row.block_index,
            "ids/position": row.position,
            "ids/trial": row.id,
            "ids/attempt": attempt_id,
            "ids/node": attempt.node_id,
            "arm": row.arm,
            "role": row.role,
            "seed": row.seed,
            "digests/spec": row.spec_digest,
            "digests/rule": row.rule_digest,
            "digests/arm": _arms(row.plan)[row.arm].digest,
        }
        for row in rows
    }


def _problems(report: BlockReport, expected: dict[str, dict[str, Any]]) -> Iterator[SpecProblem]:
    seen: set[str] = set()
    for number, receipt in enumerate(report.receipts):
        where = f"#/receipts/{number}"
        trial_id = read_path(receipt, "ids/trial")
        if trial_id not in expected or trial_id in seen:
            yield SpecProblem(pointer=f"{where}/ids/trial", detail=f"{trial_id!r} is not an open trial of this block")
            continue
        seen.add(trial_id)
        for path, detail in mismatches(receipt, expected[trial_id]):
            yield SpecProblem(pointer=f"{where}/{path}", detail=detail)
        for fault in verify(receipt):
            yield SpecProblem(pointer=where, detail=fault)
    for trial_id in sorted(set(expected) - seen):
        yield SpecProblem(pointer="#/receipts", detail=f"no receipt for trial {trial_id}", hint="report a block whole")


def verified(receipt: dict[str, Any]) -> VerifiedReceipt:
    """Return a receipt, which the caller has checked, as the store takes it."""
    return VerifiedReceipt(
        trial_id=receipt["ids"]["trial"],
        outcome=receipt["outcome"],
        arm_digest=receipt["digests"]["arm"],
        wall_s=float(receipt["wall_s"]),
        digest=receipt["digest"],
        payload=canonical_json(receipt),
    )
