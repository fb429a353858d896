"""The arm whose trial broke an attempt, and what every ablation asks."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("arm", sa.String(120), nullable=True))
    op.create_table(
        "questions",
        sa.Column("ablation_id", sa.String(30), sa.ForeignKey("ablations.id"), nullable=False),
        sa.Column("arm", sa.String(120), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.PrimaryKeyConstraint("ablation_id", "arm"),
    )
    op.create_index("ix_questions_digest", "questions", ["digest"])


def downgrade() -> None:
    op.drop_table("questions")
    op.drop_column("attempts", "arm")
