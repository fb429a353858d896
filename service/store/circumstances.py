"""What a verdict takes into account besides plan, spec and receipts, as far as the tables know it."""

from sqlalchemy import Connection

from experiments.records.circumstances import Circumstances
from service.store import keys
from service.store.breaks import broken_attempts
from service.store.families import family_of


def circumstances_of(connection: Connection, ablation_id: str) -> Circumstances:
    """Return the broken attempts of an ablation, the earlier ones that asked the same, and who signed its blocks."""
    return Circumstances(
        attempts=broken_attempts(connection, ablation_id),
        family=family_of(connection, ablation_id),
        signers=keys.signers(connection, ablation_id),
    )
