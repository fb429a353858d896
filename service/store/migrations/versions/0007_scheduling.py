"""Who may take what, whose turn it is, and counters in place of counting."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_COUNTED = ("held", "queued", "running")
_QUEUED = sa.text("state = 'queued'")


def upgrade() -> None:
    _add_columns()
    op.create_table(
        "turns",
        sa.Column("node_class", sa.String(32), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("node_class", "priority", name="pk_turns"),
    )
    op.execute("UPDATE attempts SET ablation_id = (SELECT ablation_id FROM blocks WHERE blocks.id = attempts.block_id)")
    op.create_index("ix_attempts_ablation_id_state", "attempts", ["ablation_id", "state"])
    op.create_index("ix_attempts_node_id_started_at", "attempts", ["node_id", "started_at"])
    _fill()
    op.drop_index("ix_blocks_queue", table_name="blocks")
    order: list[str | sa.TextClause] = ["node_class", sa.text("priority DESC"), "turn", "ablation_id", "index"]
    op.create_index("ix_blocks_queue", "blocks", order, sqlite_where=_QUEUED, postgresql_where=_QUEUED)


def _add_columns() -> None:
    for name in _COUNTED:
        op.add_column("ablations", sa.Column(f"blocks_{name}", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("ablations", sa.Column("device_s", sa.Double(), nullable=False, server_default="0"))
    op.add_column("ablations", sa.Column("priority", sa.Integer(), nullable=False, server_default="50"))
    op.add_column("blocks", sa.Column("turn", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("blocks", sa.Column("lanes", sa.String(64), nullable=False, server_default=""))
    op.add_column("blocks", sa.Column("limit_at", sa.Double()))
    op.add_column("blocks", sa.Column("avoid_node_id", sa.String(30)))
    op.add_column("blocks", sa.Column("avoid_until", sa.Double(), nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("draining", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("nodes", sa.Column("quarantined_reason", sa.Text()))
    op.add_column("nodes", sa.Column("stopped_by", sa.String(64)))
    op.add_column("nodes", sa.Column("stopped_at", sa.Double()))
    op.add_column("nodes", sa.Column("resumed_at", sa.Double(), nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("lanes", sa.Text()))
    op.add_column("attempts", sa.Column("ablation_id", sa.String(30)))


def _fill() -> None:
    """Count once what is kept from now on, and give every waiting block the turn of its place."""
    own = "(SELECT count(*) FROM blocks WHERE blocks.ablation_id = ablations.id AND blocks.state = '{0}')"
    for name in _COUNTED:
        op.execute(f"UPDATE ablations SET blocks_{name} = {own.format(name)}")  # noqa: S608  # names of ours
    op.execute(
        "UPDATE ablations SET priority = coalesce("
        "(SELECT max(priority) FROM blocks WHERE blocks.ablation_id = ablations.id), 50)"
    )
    op.execute('UPDATE blocks SET turn = "index"')
    op.execute(
        "UPDATE ablations SET device_s = coalesce("
        "(SELECT sum(ended_at - started_at) FROM attempts WHERE attempts.ablation_id = ablations.id), 0)"
    )


def downgrade() -> None:
    op.drop_table("turns")
    op.drop_index("ix_blocks_queue", table_name="blocks")
    op.drop_index("ix_attempts_node_id_started_at", table_name="attempts")
    op.drop_index("ix_attempts_ablation_id_state", table_name="attempts")
    op.drop_column("attempts", "ablation_id")
    for column in ("lanes", "resumed_at", "stopped_at", "stopped_by", "quarantined_reason", "draining"):
        op.drop_column("nodes", column)
    for column in ("avoid_until", "avoid_node_id", "limit_at", "lanes", "turn"):
        op.drop_column("blocks", column)
    for column in ("priority", "device_s", *(f"blocks_{name}" for name in _COUNTED)):
        op.drop_column("ablations", column)
    order: list[str | sa.TextClause] = ["node_class", sa.text("priority DESC"), "ablation_id", "index"]
    op.create_index("ix_blocks_queue", "blocks", order, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
