"""Probes of quarantined nodes by themselves: when the next one is due, when one began, and how many there were."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("probe_at", sa.Double(), nullable=True))
    op.add_column("nodes", sa.Column("probe_began_at", sa.Double(), nullable=True))
    op.add_column("nodes", sa.Column("probes", sa.Integer(), nullable=False, server_default="0"))
