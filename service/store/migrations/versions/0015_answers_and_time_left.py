"""Answers in a few words, and what the time left is estimated from: finished attempts, and news of trials."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_HEARD = ("step_s", "started_at", "over_at", "runs_since")


def upgrade() -> None:
    op.add_column("ablations", sa.Column("settled_s", sa.Double(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE ablations SET settled_s = coalesce((SELECT sum(ended_at - started_at) FROM attempts "
        "WHERE attempts.ablation_id = ablations.id AND attempts.state = 'done'), 0)"
    )
    op.add_column("ablations", sa.Column("answer", sa.Text()))
    for name in _HEARD:
        op.add_column("trials", sa.Column(name, sa.Double()))


def downgrade() -> None:
    for name in _HEARD:
        op.drop_column("trials", name)
    op.drop_column("ablations", "answer")
    op.drop_column("ablations", "settled_s")
