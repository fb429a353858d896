"""How many devices a block needs and a node has: one each until the node registers again."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("blocks", "nodes"):
        op.add_column(table, sa.Column("num_devices", sa.Integer(), nullable=False, server_default="1"))


def downgrade() -> None:
    for table in ("blocks", "nodes"):
        op.drop_column(table, "num_devices")
