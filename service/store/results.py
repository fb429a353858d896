"""What the background process makes of an ended ablation: verdict, report, and where it is in MLflow."""

from dataclasses import dataclass

from sqlalchemy import Connection, delete, select, update

from service.lifecycle import AblationState, BlockState
from service.store import outbox
from service.store.columns import db_now
from service.store.completion import settle
from service.store.tables import ablations, blocks, idempotency
from service.store.transitions import Journal, lock_ablation


@dataclass(frozen=True, kw_only=True)
class SpecText:
    """A spec as it was submitted."""

    data: bytes
    content_type: str


def spec_text(connection: Connection, ablation_id: str) -> SpecText:
    """Return the stored spec."""
    query = select(ablations.c.spec_text, ablations.c.content_type).where(ablations.c.id == ablation_id)
    row = connection.execute(query).one()
    return SpecText(data=row.spec_text.encode(), content_type=row.content_type)


def store_verdict(connection: Connection, ablation_id: str, verdict_json: str, *, words: dict[str, str]) -> None:
    """Store the verdict once, tell it to watchers, and ask for the report."""
    lock_ablation(connection, ablation_id)
    first = update(ablations).where(ablations.c.id == ablation_id, ablations.c.verdict.is_(None))
    if connection.execute(first.values(verdict=verdict_json)).rowcount:
        journal = Journal(connection, ablation_id, actor="judge")
        journal.note("verdict", ablation_id, reason="every block ended", data={"variants": words})
        journal.flush()
    outbox.add(connection, outbox.REPORT, ablation_id)


def store_report(connection: Connection, ablation_id: str, html: str) -> None:
    """Store the report and ask for the projection."""
    connection.execute(update(ablations).where(ablations.c.id == ablation_id).values(report_html=html))
    outbox.add(connection, outbox.PROJECT, ablation_id)


def read_report(connection: Connection, ablation_id: str) -> str:
    """Return the stored report."""
    query = select(ablations.c.report_html).where(ablations.c.id == ablation_id)
    return str(connection.execute(query).scalar_one())


def store_projection(connection: Connection, ablation_id: str, *, experiment_id: str, run_id: str) -> None:
    """Remember where the ablation is in MLflow."""
    values = {"mlflow_experiment_id": experiment_id, "mlflow_run_id": run_id}
    connection.execute(update(ablations).where(ablations.c.id == ablation_id).values(**values))


def settle_cancelling(connection: Connection) -> int:
    """End ablations that are being cancelled and have no running block; return how many."""
    running = select(blocks.c.id).where(blocks.c.ablation_id == ablations.c.id, blocks.c.state == BlockState.RUNNING)
    stuck = select(ablations.c.id).where(ablations.c.state == AblationState.CANCELLING, ~running.exists())
    ids = list(connection.execute(stuck).scalars())
    for ablation_id in ids:
        settle(connection, ablation_id)
    return len(ids)


def forget_idempotency(connection: Connection, *, age_s: float) -> int:
    """Delete answers to Idempotency-Keys older than `age_s`; return how many."""
    return connection.execute(delete(idempotency).where(idempotency.c.created_at < db_now() - age_s)).rowcount
