"""Single blocks."""

from sqlalchemy import Connection, select

from service.store.tables import attempts, blocks


def block_state(connection: Connection, attempt_id: str) -> tuple[str, str]:
    """Return (block id, its state) of an attempt's block."""
    query = select(blocks.c.id, blocks.c.state).join(attempts, attempts.c.block_id == blocks.c.id)
    row = connection.execute(query.where(attempts.c.id == attempt_id)).one()
    return row.id, row.state
