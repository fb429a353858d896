"""A/A blocks: what a node's noise is known by."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "aa_blocks",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("block_index", sa.Integer(), nullable=False),
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("workload", sa.String(length=71), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name=op.f("fk_aa_blocks_ablation_id")),
        sa.PrimaryKeyConstraint("ablation_id", "block_index", name=op.f("pk_aa_blocks")),
    )
    op.create_index(op.f("ix_aa_blocks_node_class"), "aa_blocks", ["node_class"])
    op.create_index(op.f("ix_aa_blocks_workload"), "aa_blocks", ["workload"])


def downgrade() -> None:
    op.drop_table("aa_blocks")
