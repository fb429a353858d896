"""A/A blocks in the database, and the calibrations and the ledger that follow from them."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, insert, select

from experiments.analysis.noise.admission import admission_of, mending_command
from experiments.analysis.noise.calibrate import calibrate_all
from experiments.analysis.noise.ledger import keep_ledger
from experiments.analysis.sizing import size_of, workload_of
from experiments.design.plan import Plan
from experiments.design.spec import AblationSpec
from experiments.records.calibration import AABlock, Calibration, CalibrationKey, Ledger
from experiments.records.circumstances import Admission
from experiments.records.receipts import Receipt
from experiments.records.sizing import Sizing
from service.store.tables import aa_blocks


def store_aa_blocks(connection: Connection, ablation_id: str, found: Iterable[tuple[CalibrationKey, AABlock]]) -> None:
    """Store the A/A blocks of an ablation; those that are there stay as they are."""
    query = select(aa_blocks.c.block_index).where(aa_blocks.c.ablation_id == ablation_id)
    there = set(connection.execute(query).scalars())
    rows = [
        {
            "ablation_id": ablation_id,
            "block_index": block.block_index,
            "node_class": key.node_class,
            "workload": key.workload,
            "key": key.model_dump_json(),
            "payload": block.model_dump_json(),
        }
        for key, block in found
        if block.block_index not in there
    ]
    if rows:
        connection.execute(insert(aa_blocks), rows)


def read_calibrations(
    connection: Connection, *, node_class: str | None = None, workload: str | None = None
) -> tuple[Calibration, ...]:
    """Return what is known of every key with at least two A/A blocks, or of one class or workload; the newest last."""
    given = {"node_class": node_class, "workload": workload}
    wanted = {name: value for name, value in given.items() if value is not None}
    return _calibrated(connection.execute(_known(tuple(wanted)), wanted))


def _calibrated(rows: Iterable[Row[Any]]) -> tuple[Calibration, ...]:
    return calibrate_all(
        (CalibrationKey.model_validate_json(row.key), AABlock.model_validate_json(row.payload)) for row in rows
    )


@cache
def _known(by: tuple[str, ...]) -> Select[tuple[str, str]]:
    """Return the query for A/A blocks by some columns, built once."""
    return select(aa_blocks.c.key, aa_blocks.c.payload).where(*(aa_blocks.c[name] == bindparam(name) for name in by))


OF_WORKLOAD = _known(("workload",))
"""The query that `sizing_of` takes the rows of, by the parameter `workload`; every submission asks."""


def read_ledger(connection: Connection) -> Ledger:
    """Return the false words over all A/A ablations that the service knows."""
    return keep_ledger(read_calibrations(connection))


def read_admission(
    connection: Connection, ablation_id: str, spec: AblationSpec, receipts: Sequence[Receipt]
) -> Admission:
    """Return whether the A/A blocks that the service knows allow words about an ablation."""
    node_class = spec.placement.node_class
    return admission_of(
        spec,
        receipts,
        read_calibrations(connection, node_class=node_class),
        ledger=read_ledger(connection),
        mended_by=mending_command(node_class, ablation_id),
    )


def read_sizing(connection: Connection, spec: AblationSpec, plan: Plan) -> Sizing | None:
    """Return what `plan` can see at the noise that the service measured; None where it knows none."""
    return sizing_of(connection.execute(OF_WORKLOAD, {"workload": workload_of(plan, spec)}), spec, plan)


def sizing_of(rows: Iterable[Row[Any]], spec: AblationSpec, plan: Plan) -> Sizing | None:
    """Return what `plan` can see at the noise of A/A blocks of its workload; None where there are too few."""
    return size_of(spec, plan, _calibrated(rows))
