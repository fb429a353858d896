"""Files of an import without a signature."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ablations", sa.Column("unsigned", sa.Text()))
