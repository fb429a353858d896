"""Ablations have turns and priorities, their blocks none: a retry touches no other block."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_QUEUED = sa.text("state = 'queued'")
_WAITS = sa.text("blocks_queued > 0")


def upgrade() -> None:
    op.add_column("ablations", sa.Column("turn", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE ablations SET turn = coalesce((SELECT min(turn) FROM blocks "
        "WHERE blocks.ablation_id = ablations.id AND blocks.state = 'queued'), 0)"
    )
    op.drop_index("ix_blocks_queue", table_name="blocks")
    for name in ("turn", "priority"):
        op.drop_column("blocks", name)
    own = ["ablation_id", "index"]
    op.create_index("ix_blocks_queued", "blocks", own, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
    order: list[str | sa.TextClause] = ["node_class", sa.text("priority DESC"), "turn", "id", "blocks_queued"]
    op.create_index("ix_ablations_queue", "ablations", order, sqlite_where=_WAITS, postgresql_where=_WAITS)


def downgrade() -> None:
    op.drop_index("ix_ablations_queue", table_name="ablations")
    op.drop_index("ix_blocks_queued", table_name="blocks")
    op.add_column("blocks", sa.Column("priority", sa.Integer(), nullable=False, server_default="50"))
    op.add_column("blocks", sa.Column("turn", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE blocks SET priority = (SELECT priority FROM ablations WHERE ablations.id = blocks.ablation_id), "
        'turn = "index" + (SELECT turn FROM ablations WHERE ablations.id = blocks.ablation_id)'
    )
    order: list[str | sa.TextClause] = ["node_class", sa.text("priority DESC"), "turn", "ablation_id", "index"]
    op.create_index("ix_blocks_queue", "blocks", order, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
    op.drop_column("ablations", "turn")
