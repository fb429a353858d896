"""Back ends that blocks need, and those that nodes tried in vain."""

import json

import sqlalchemy as sa
from alembic import op

from service.store.nodes.placement import back_ends_that_failed

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_NODES = sa.table("nodes", sa.column("id"), sa.column("registration"), sa.column("failed_back_ends"))


def upgrade() -> None:
    op.add_column("blocks", sa.Column("back_ends", sa.Text(), nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("failed_back_ends", sa.Text()))
    connection = op.get_bind()
    for row in connection.execute(sa.select(_NODES.c.id, _NODES.c.registration)).all():
        failed = back_ends_that_failed(json.loads(row.registration).get("lanes"))
        connection.execute(sa.update(_NODES).where(_NODES.c.id == row.id).values(failed_back_ends=failed))
