"""Tables of sessions and their proposals."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("spec_text", sa.Text(), nullable=False),
        sa.Column("metric", sa.String(length=64), nullable=False),
        sa.Column("node_class", sa.String(length=32), nullable=False),
        sa.Column("opened_by", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_sessions"),
    )
    op.create_table(
        "proposals",
        sa.Column("session", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.ForeignKeyConstraint(["session"], ["sessions.name"], name="fk_proposals_session"),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name="fk_proposals_ablation_id"),
        sa.PrimaryKeyConstraint("session", "number", name="pk_proposals"),
        sa.UniqueConstraint("ablation_id", name="uq_proposals_ablation_id"),
    )
