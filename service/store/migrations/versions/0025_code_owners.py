"""Who may use an archive of code: the tokens that sent it, and those with which a sender shared it."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0023"
branch_labels = None
depends_on = None

_SENDERS = """
INSERT INTO code_owners (digest, token_id, shared_by)
SELECT a.digest, t.id, NULL FROM code_archives a JOIN tokens t ON t.name = a.sent_by
WHERE t.created_at <= a.created_at AND (t.revoked_at IS NULL OR t.revoked_at >= a.created_at)
"""


def upgrade() -> None:
    op.create_table(
        "code_owners",
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("token_id", sa.String(length=30), nullable=False),
        sa.Column("shared_by", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["digest"], ["code_archives.digest"], name="fk_code_owners_digest"),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name="fk_code_owners_token_id"),
        sa.PrimaryKeyConstraint("digest", "token_id", name="pk_code_owners"),
    )
    op.execute(_SENDERS)
