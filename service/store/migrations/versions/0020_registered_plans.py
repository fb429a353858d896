"""Plans that were registered before they were carried away, and the key that countersigns them."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "registered_plans",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("registered_by", sa.String(length=64), nullable=False),
        sa.Column("countersignature", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("ablation_id", name="pk_registered_plans"),
    )
    op.create_table(
        "registered_questions",
        sa.Column("ablation_id", sa.String(length=30), nullable=False),
        sa.Column("arm", sa.String(length=120), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.ForeignKeyConstraint(
            ["ablation_id"], ["registered_plans.ablation_id"], name="fk_registered_questions_ablation_id"
        ),
        sa.PrimaryKeyConstraint("ablation_id", "arm", name="pk_registered_questions"),
    )
    op.create_index("ix_registered_questions_digest", "registered_questions", ["digest"], unique=False)
    keys = op.create_table(
        "service_keys",
        sa.Column("seed", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("seed", name="pk_service_keys"),
    )
    op.bulk_insert(keys, [{"seed": secrets.token_bytes(32).hex()}])
