"""The arm whose trial broke an attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("arm", sa.String(120), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "arm")
