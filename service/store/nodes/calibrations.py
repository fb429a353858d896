"""Stored A/A blocks, and the calibrations and the ledger computed from them."""

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, insert, select

from ablate.experiments.analysis.noise.admission import admission_of, keep_ledger, mending_command
from ablate.experiments.analysis.noise.calibrate import calibrate_all
from ablate.experiments.analysis.sizing import SeedSpread, size_by_seeds, size_of, spreads_in, workload_of
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.plan import Plan
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.records.calibration import AABlock, Calibration, CalibrationKey, Ledger, Sizing
from ablate.experiments.records.circumstances import Admission
from ablate.experiments.records.receipts import Receipt
from ablate.service.store.tables import aa_blocks, ablations, attempts, blocks, receipts

_LATEST = 20
"""Ablations whose seeds size a loss."""


def store_aa_blocks(
    connection: Connection, ablation_id: str, new_blocks: Iterable[tuple[CalibrationKey, AABlock]]
) -> None:
    """Store the A/A blocks of an ablation; stored ones stay as they are."""
    query = select(aa_blocks.c.block_index).where(aa_blocks.c.ablation_id == ablation_id)
    stored = set(connection.execute(query).scalars())
    rows = [
        {
            "ablation_id": ablation_id,
            "block_index": block.block_index,
            "node_class": key.node_class,
            "workload": key.workload,
            "key": key.model_dump_json(),
            "payload": block.model_dump_json(),
        }
        for key, block in new_blocks
        if block.block_index not in stored
    ]
    if rows:
        connection.execute(insert(aa_blocks), rows)


def read_calibrations(
    connection: Connection, *, node_class: str | None = None, workload: str | None = None
) -> tuple[Calibration, ...]:
    """Return the calibration of every key with at least two A/A blocks, the newest last.

    `node_class` and `workload` restrict it to one class or workload.
    """
    query = select(aa_blocks.c.key, aa_blocks.c.payload, attempts.c.signed_by)
    query = query.outerjoin(
        blocks, (blocks.c.ablation_id == aa_blocks.c.ablation_id) & (blocks.c["index"] == aa_blocks.c.block_index)
    ).outerjoin(attempts, attempts.c.id == blocks.c.attempt_id)
    if node_class is not None:
        query = query.where(aa_blocks.c.node_class == node_class)
    if workload is not None:
        query = query.where(aa_blocks.c.workload == workload)
    return calibrate_all(
        (CalibrationKey.model_validate_json(row.key), _block(row.payload, row.signed_by))
        for row in connection.execute(query)
    )


def _block(payload: str, signed_by: str | None) -> AABlock:
    return AABlock.model_validate_json(payload).model_copy(update={"signed_by": signed_by})


def read_ledger(connection: Connection) -> Ledger:
    """Return the counts of false verdicts over all A/A ablations of this service."""
    return keep_ledger(read_calibrations(connection))


def read_admission(
    connection: Connection, ablation_id: str, spec: AblationSpec, receipts: Sequence[Receipt]
) -> Admission:
    """Return whether the stored A/A blocks allow verdicts about speed for an ablation."""
    node_class = spec.placement.node_class
    return admission_of(
        spec,
        receipts,
        read_calibrations(connection, node_class=node_class),
        ledger=read_ledger(connection),
        mended_by=mending_command(node_class, ablation_id),
    )


def read_seed_spreads(connection: Connection, plan: Plan, metric: str) -> list[SeedSpread]:
    """Return how a loss differed between seeds in the latest judged ablations with the baseline of `plan`."""
    ran = select(receipts.c.ablation_id).where(receipts.c.arm_digest == plan.baseline.digest)
    judged = ablations.c.id.in_(ran) & ablations.c.verdict.is_not(None)
    query = select(ablations.c.name, ablations.c.verdict).where(judged).order_by(ablations.c.id.desc()).limit(_LATEST)
    return [
        spread
        for row in connection.execute(query)
        for spread in spreads_in(row.name, Verdict.model_validate_json(row.verdict), metric)
    ]


def read_sizing(
    connection: Connection,
    spec: AblationSpec,
    plan: Plan,
    calibrations: Sequence[Calibration] | None = None,
    *,
    asking: int = 1,
) -> Sizing | None:
    """Return the effect that `plan` can detect at this asking and the measured noise of its workload.

    None if the noise is unknown. It reads the calibrations of the workload, unless they are given.

    A loss has the noise that earlier ablations of the same baseline measured over seeds.
    """
    if spec.verdict.primary.over_seeds:
        spreads = read_seed_spreads(connection, plan, spec.verdict.primary.metric)
        return size_by_seeds(spec, plan, spreads, asking=asking)
    if calibrations is None:
        calibrations = read_calibrations(connection, workload=workload_of(plan, spec))
    return size_of(spec, plan, calibrations, asking=asking)
