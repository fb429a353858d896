"""The attempt of a trial is that of its block: no claim writes it for every trial again."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_column("trials", "attempt_id")


def downgrade() -> None:
    op.add_column("trials", sa.Column("attempt_id", sa.String(30)))
    op.execute("UPDATE trials SET attempt_id = (SELECT attempt_id FROM blocks WHERE blocks.id = trials.block_id)")
