"""Names of ablations, and beginnings of names, are found by an index."""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_ablations_name_id", "ablations", ["name", "id"], postgresql_ops={"name": "text_pattern_ops"})


def downgrade() -> None:
    op.drop_index("ix_ablations_name_id", table_name="ablations")
