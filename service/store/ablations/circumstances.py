"""What a verdict takes into account besides plan, spec and receipts, as far as the tables know it."""

from sqlalchemy import Connection, select

from experiments.outcomes import BlockState
from experiments.records.circumstances import Circumstances
from service.store.ablations.families import family_of
from service.store.access import keys
from service.store.blocks.breaks import broken_attempts
from service.store.tables import blocks


def circumstances_of(connection: Connection, ablation_id: str) -> Circumstances:
    """Return the broken attempts of an ablation, the earlier ones that asked the same, and who signed its blocks."""
    return Circumstances(
        attempts=broken_attempts(connection, ablation_id),
        family=family_of(connection, ablation_id),
        signers=keys.signers(connection, ablation_id),
        not_run=_not_run(connection, ablation_id),
    )


def _not_run(connection: Connection, ablation_id: str) -> str | None:
    """Return why blocks were cancelled; None where none was."""
    cancelled = select(blocks.c.message).where(
        blocks.c.ablation_id == ablation_id, blocks.c.state == BlockState.CANCELLED
    )
    return connection.scalar(cancelled.order_by(blocks.c["index"]).limit(1))
