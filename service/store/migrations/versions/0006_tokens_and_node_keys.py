"""Tokens with several secrets, an owner and a quota; keys of nodes; who submitted; random tokens of attempts."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TOKENS = sa.table("tokens", *(sa.column(name) for name in ("id", "name", "scope", "digest", "created_at")))
_RUNNING = sa.text("state = 'running'")


def upgrade() -> None:
    known = list(op.get_bind().execute(sa.select(_TOKENS).where(_TOKENS.c.scope != "worker")))
    op.drop_table("tokens")
    _create_tokens()
    _fill_tokens(known)
    _ablations_know_their_token()
    _attempts_hold_random_tokens()


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(30), nullable=False),
        sa.Column("name", sa.String(130), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("node", sa.String(120), nullable=True),
        sa.Column("node_class", sa.String(32), nullable=True),
        sa.Column("device_minutes", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    live = sa.text("revoked_at IS NULL")
    op.create_index("uq_tokens_live_name", "tokens", ["name"], unique=True, sqlite_where=live, postgresql_where=live)
    op.create_table(
        "token_secrets",
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("token_id", sa.String(30), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ends_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_token_secrets")),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_token_secrets_token_id")),
    )
    op.create_index(op.f("ix_token_secrets_token_id"), "token_secrets", ["token_id"])


def _fill_tokens(known: list[sa.Row[Any]]) -> None:
    """Keep the tokens of people; the one key of all workers ends here, as every node has its own from now on."""
    names = ("id", "name", "scope", "created_at", "created_by")
    made = sa.table("tokens", *(sa.column(name) for name in names))
    kept = sa.table("token_secrets", *(sa.column(name) for name in ("digest", "token_id", "created_at")))
    for row in known:
        by = "settings" if row.name == "admin" else "unknown"
        values = {"id": row.id, "name": row.name, "scope": row.scope, "created_at": row.created_at, "created_by": by}
        op.execute(sa.insert(made).values(**values))
        op.execute(sa.insert(kept).values(digest=row.digest, token_id=row.id, created_at=row.created_at))


def _ablations_know_their_token() -> None:
    op.add_column("ablations", sa.Column("token_id", sa.String(30), nullable=True))
    op.execute(
        "UPDATE ablations SET token_id = (SELECT tokens.id FROM tokens WHERE tokens.name = ablations.submitted_by) "
        "WHERE bundles IS NULL"
    )
    op.create_index(op.f("ix_ablations_token_id"), "ablations", ["token_id"])


def _attempts_hold_random_tokens() -> None:
    """Attempts that run now lose their lease: no worker can show the token that they do not have."""
    op.drop_column("blocks", "token")
    op.drop_column("attempts", "token")
    op.add_column("attempts", sa.Column("token", sa.String(22), nullable=True))
    op.create_index("ix_blocks_holders", "blocks", ["node_id"], sqlite_where=_RUNNING, postgresql_where=_RUNNING)


def downgrade() -> None:
    raise NotImplementedError("secrets of nodes cannot be turned into the one key of all workers again")
