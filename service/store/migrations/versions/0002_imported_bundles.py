"""Digests of the bundles that an imported ablation came from."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ablations", sa.Column("bundles", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("ablations", "bundles")
