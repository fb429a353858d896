"""Links that show one answer to people without a token, and an index for the filter by owner."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "share_links",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("created_by", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("uses", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name="fk_share_links_ablation_id"),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name="fk_share_links_token_id"),
        sa.PrimaryKeyConstraint("id", name="pk_share_links"),
        sa.UniqueConstraint("digest", name="uq_share_links_digest"),
    )
    op.create_index("ix_share_links_ablation_id", "share_links", ["ablation_id"], unique=False)
    op.create_index("ix_ablations_submitted_by_id", "ablations", ["submitted_by", "id"], unique=False)
