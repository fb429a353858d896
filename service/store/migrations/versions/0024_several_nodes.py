"""Blocks on several nodes: their members, and what nodes need in common to share one."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("blocks", sa.Column("num_nodes", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("nodes", sa.Column("meeting", sa.String(length=64)))
    op.add_column("nodes", sa.Column("likeness", sa.String(length=71)))
    op.create_index(
        "ix_blocks_several_nodes",
        "blocks",
        ["node_class"],
        sqlite_where=sa.text("num_nodes > 1 AND state = 'queued'"),
        postgresql_where=sa.text("num_nodes > 1 AND state = 'queued'"),
    )
    op.create_table(
        "members",
        sa.Column("attempt_id", sa.String(length=30), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("block_id", sa.String(length=30), nullable=False),
        sa.Column("node_id", sa.String(length=30), nullable=False),
        sa.Column("claim_id", sa.String(length=22), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("left_at", sa.Double(), nullable=True),
        sa.Column("parts", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_members_attempt_id"),
        sa.ForeignKeyConstraint(["block_id"], ["blocks.id"], name="fk_members_block_id"),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name="fk_members_node_id"),
        sa.PrimaryKeyConstraint("attempt_id", "number", name="pk_members"),
    )
    op.create_index("ix_members_node_id", "members", ["node_id"], unique=False)
