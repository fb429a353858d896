"""Notifications of owners: where each is told about the end of its ablations, and what was sent."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "notifications",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name="fk_notifications_token_id"),
        sa.PrimaryKeyConstraint("id", name="pk_notifications"),
    )
    op.create_index("ix_notifications_token_id", "notifications", ["token_id"], unique=False)
    op.create_table(
        "notices",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("notification_id", sa.String(length=30), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("sent_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name="fk_notices_ablation_id"),
        sa.PrimaryKeyConstraint("id", name="pk_notices"),
        sa.UniqueConstraint("notification_id", "ablation_id", name="uq_notices_notification_id_ablation_id"),
    )
