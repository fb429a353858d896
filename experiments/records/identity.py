"""Identity of planned work: ids of blocks and trials, claims, and the fields that receipts must repeat.

The worker copies these fields from its claim into the receipt. The service and the reader of a bundle rebuild the claim
and compare. The judge has only the plan and compares the fields that follow from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from ablate.experiments.design.arms import Arm, TrialConfig
from ablate.experiments.design.plan import Plan
from ablate.experiments.documents import Frozen
from ablate.experiments.ids import id_pattern, new_ids
from ablate.experiments.outcomes import FailureClass, SeedOrigin
from ablate.experiments.records.messages import FencingToken, LogChunk
from ablate.experiments.records.signing import Signature, report_statement
from ablate.experiments.retries import Break, final_failures

UNLIMITED_S = 10.0**9
"""Lease of a block that no other worker can claim."""
UNFENCED = "-" * 22
"""Token of a block that no other worker can claim."""


class ClaimedTrial(Frozen):
    """One arm of a claimed block, in running order."""

    trial_id: str
    arm: str
    role: str
    position: int
    arm_digest: str
    gates: Mapping[str, Any]
    config: TrialConfig
    """With the block's seed."""
    timeout_s: float
    final_failures: tuple[FailureClass, ...] = final_failures((), 0, "")
    """Failure classes that are a result of this arm now: its trial gets a receipt of the failure and the block goes on.
    A trial that ends by another class breaks its block."""


class ClaimedBlock(Frozen):
    """A block under a lease. Every later call carries `token`; a call with another token gets 409."""

    attempt_id: str
    token: FencingToken
    attempt_no: int
    lease_s: float
    heartbeat_s: float
    ablation_id: str
    ablation_name: str
    block_id: str
    block_index: int
    """In the plan, from 0."""
    seed: int
    timed: bool
    """Whether times decide; disturbances of times alone (load, clocks, heat) spoil the block only then."""
    max_foreign_load: float
    """Share of the cores' time that other processes may take during a trial on the host, where times decide."""
    cold_caches: bool
    """Whether trials start with empty compiler caches on disk: where compile time decides."""
    profile: bool = Field(default=False, exclude_if=lambda profile: not profile)
    """Whether trials of the built-in model run one more step after their window, under torch's profiler."""
    spec_digest: str
    rule_digest: str
    request_id: str | None = None
    """Of the request that submitted the ablation; the worker's log lines and calls carry it as well."""
    expected_s: float | None = None
    """Mean time of the ablation's finished blocks; None before the first."""
    trials: tuple[ClaimedTrial, ...]


class BlockReport(Frozen):
    """`POST /v1/attempts/{id}:report`: the whole block, or why it broke."""

    token: FencingToken
    receipts: tuple[Mapping[str, Any], ...] = ()
    """Receipts as JSON, one per trial; empty when the block broke."""
    logs: tuple[LogChunk, ...] = ()
    failure_class: FailureClass | None = None
    """Set when the block broke: it is discarded and rerun whole, or fails when its attempts are used up."""
    arm: str | None = None
    """Arm whose trial broke the block; None when unknown."""
    message: str | None = None
    signature: Signature | None = None
    """Of the node, over `statement`."""

    def statement(self, block: ClaimedBlock) -> bytes:
        """Return the bytes that the node signs: ids of the block, digests of its receipts, and why it broke."""
        ids = {"ablation": block.ablation_id, "block": block.block_id, "attempt": block.attempt_id}
        broke = None
        if self.failure_class is not None:
            broke = self.model_dump(mode="json", exclude={"token", "receipts", "logs", "signature"})
        return report_statement(ids, [str(receipt.get("digest")) for receipt in self.receipts], broke)


class BlockIds(Frozen):
    """Ids of the plan's block at the same index."""

    block_id: Annotated[str, Field(pattern=id_pattern("blk"))]
    trial_ids: tuple[Annotated[str, Field(pattern=id_pattern("trl"))], ...]
    """In running order."""


@dataclass(frozen=True, kw_only=True)
class AttemptLease:
    """The attempt of a claim, and its lease."""

    attempt_id: str
    attempt_no: int
    token: str = UNFENCED
    lease_s: float = UNLIMITED_S
    heartbeat_s: float = UNLIMITED_S


@dataclass(frozen=True, kw_only=True)
class PlannedWork:
    """The claimed block of an ablation, and earlier broken attempts."""

    ablation_id: str
    block_index: int
    timeout_s: float
    """Wall time limit of one trial."""
    broken: Sequence[Break] = ()
    """Broken attempts at blocks of this ablation."""
    request_id: str | None = None
    """Of the request that submitted the ablation."""
    expected_s: float | None = None
    """Mean time of the ablation's finished blocks."""


def new_block_ids(plan: Plan) -> tuple[BlockIds, ...]:
    """Return new ids for the blocks of `plan` and their trials."""
    trial_ids = iter(new_ids("trl", len(plan.blocks) * len(plan.arms)))
    return tuple(
        BlockIds(block_id=block_id, trial_ids=tuple(next(trial_ids) for _ in block.order))
        for block_id, block in zip(new_ids("blk", len(plan.blocks)), plan.blocks, strict=True)
    )


def claimed_block(plan: Plan, ids: BlockIds, work: PlannedWork, lease: AttemptLease) -> ClaimedBlock:
    """Return a block of `plan` as a node receives it."""
    if plan.seeds is SeedOrigin.TO_BE_DRAWN:
        raise AssertionError("a plan whose seeds were not drawn was given to a node")
    block = plan.blocks[work.block_index]
    work = replace(work, broken=[one for one in work.broken if one.failure_class.rule.final_when])
    places = enumerate(zip(block.order, ids.trial_ids, strict=True))
    return ClaimedBlock(
        attempt_id=lease.attempt_id,
        token=lease.token,
        attempt_no=lease.attempt_no,
        lease_s=lease.lease_s,
        heartbeat_s=lease.heartbeat_s,
        ablation_id=work.ablation_id,
        ablation_name=plan.ablation,
        block_id=ids.block_id,
        block_index=work.block_index,
        seed=block.seed,
        timed=plan.timed,
        max_foreign_load=plan.max_foreign_load,
        cold_caches=plan.cold_caches,
        profile=plan.profile,
        spec_digest=plan.spec_digest,
        rule_digest=plan.rule_digest,
        request_id=work.request_id,
        expected_s=work.expected_s,
        trials=tuple(
            ClaimedTrial(
                trial_id=trial_id, position=position, **_of_arm(plan.arm_by_name[arm], seed=block.seed, work=work)
            )
            for position, (arm, trial_id) in places
        ),
    )


def _of_arm(arm: Arm, *, seed: int, work: PlannedWork) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "role": arm.role,
        "arm_digest": arm.digest,
        "gates": arm.gates,
        "config": arm.config.with_seed(seed),
        "timeout_s": work.timeout_s,
        "final_failures": final_failures(work.broken, work.block_index, arm.name),
    }


def claimed_fields(block: ClaimedBlock, trial: ClaimedTrial, *, node_id: str) -> dict[str, Any]:
    """Return the fields that the receipt of a claimed trial must have, nested as in the receipt."""
    return {
        "ids": {
            "ablation": block.ablation_id,
            "block": block.block_id,
            "block_index": block.block_index,
            "position": trial.position,
            "trial": trial.trial_id,
            "attempt": block.attempt_id,
            "node": node_id,
        },
        "arm": trial.arm,
        "role": trial.role,
        "seed": block.seed,
        "digests": {"spec": block.spec_digest, "rule": block.rule_digest, "arm": trial.arm_digest},
    }


def planned_fields(plan: Plan, index: int, arm: str) -> dict[str, Any]:
    """Return the fields that the plan fixes in the receipt of `arm` in block `index`, nested as in the receipt."""
    block, planned = plan.blocks[index], plan.arm_by_name[arm]
    return {
        "ids": {"block_index": index, "position": block.order.index(arm)},
        "arm": arm,
        "role": planned.role,
        "seed": block.seed,
        "digests": {"spec": plan.spec_digest, "rule": plan.rule_digest, "arm": planned.digest},
        "environment": {"node_class": plan.node_class},
    }


def mismatches(receipt: Mapping[str, Any], expected: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, message) of every field that differs from `expected`; a path is like "digests/spec"."""
    for name, value in expected.items():
        where, stored = f"{path}/{name}".lstrip("/"), receipt.get(name)
        if isinstance(value, Mapping):
            yield from mismatches(stored if isinstance(stored, Mapping) else {}, value, where)
        elif stored != value:
            yield where, f"is {stored!r}; expected {value!r}"
