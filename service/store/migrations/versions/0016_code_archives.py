"""Tables of uploaded code."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "code_archives",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sent_by", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_code_archives"),
    )
    op.create_index("ix_code_archives_used_at", "code_archives", ["used_at"], unique=False)
    op.create_table(
        "code_pieces",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["digest"], ["code_archives.digest"], name="fk_code_pieces_digest"),
        sa.PrimaryKeyConstraint("digest", "number", name="pk_code_pieces"),
    )
    op.create_table(
        "code_uses",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(["ablation_id"], ["ablations.id"], name="fk_code_uses_ablation_id"),
        sa.PrimaryKeyConstraint("ablation_id", "digest", name="pk_code_uses"),
    )
    op.create_index("ix_code_uses_digest", "code_uses", ["digest"], unique=False)
