"""One-time links and cookies with which people look at the service's pages."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "web_sessions",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("secret_digest", sa.String(length=71), nullable=False),
        sa.Column("scope", sa.String(length=16), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_web_sessions_token_id")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_web_sessions")),
    )
    op.create_index(op.f("ix_web_sessions_token_id"), "web_sessions", ["token_id"])


def downgrade() -> None:
    op.drop_table("web_sessions")
