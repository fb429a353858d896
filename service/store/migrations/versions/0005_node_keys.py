"""Keys that nodes sign with, and what attempts were signed with."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "node_keys",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("node", sa.String(length=120), nullable=False),
        sa.Column("trusted_by", sa.String(length=64), nullable=False),
        sa.Column("trusted_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("key", "node", name=op.f("pk_node_keys")),
    )
    op.create_index(op.f("ix_node_keys_node"), "node_keys", ["node"], unique=False)
    op.add_column("attempts", sa.Column("signature", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "signature")
    op.drop_table("node_keys")
