"""Work of the outbox that may wait for other work, and whose logs were dropped."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("outbox", sa.Column("rank", sa.Integer(), nullable=False, server_default="0"))
    op.drop_index("ix_outbox_kind_due_at", table_name="outbox")
    op.create_index("ix_outbox_kind_rank_due_at", "outbox", ["kind", "rank", "due_at"])
    op.add_column("ablations", sa.Column("logs_dropped_at", sa.Double(), nullable=True))
    op.create_index(
        "ix_ablations_logged",
        "ablations",
        ["finished_at"],
        sqlite_where=sa.text("logs_dropped_at IS NULL"),
        postgresql_where=sa.text("logs_dropped_at IS NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_ablations_logged", table_name="ablations")
    op.drop_column("ablations", "logs_dropped_at")
    op.drop_index("ix_outbox_kind_rank_due_at", table_name="outbox")
    op.create_index("ix_outbox_kind_due_at", "outbox", ["kind", "due_at"])
    op.drop_column("outbox", "rank")
