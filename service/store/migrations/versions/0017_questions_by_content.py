"""Digests of questions by the content of their arms."""

import logging

import sqlalchemy as sa
from alembic import op

from experiments.design.load import parse_spec
from experiments.design.plan import Plan, questions
from experiments.errors import SpecError

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_LOG = logging.getLogger(__name__)


def upgrade() -> None:
    """Compute the digests of all stored questions by today's rule, so that earlier askings still count."""
    connection = op.get_bind()
    ablations = sa.table("ablations", *(sa.column(name) for name in ("id", "spec_text", "content_type", "plan")))
    stored = sa.table("questions", *(sa.column(name) for name in ("ablation_id", "arm", "digest")))
    ids = connection.scalars(sa.select(stored.c.ablation_id).distinct()).all()
    for ablation_id in ids:
        row = connection.execute(sa.select(ablations).where(ablations.c.id == ablation_id)).one()
        try:
            spec = parse_spec(row.spec_text.encode(), row.content_type)
            asked = questions(spec, Plan.model_validate_json(row.plan))
        except (SpecError, ValueError, KeyError) as error:  # of code that is too old
            _LOG.warning("the questions of ablation %s do not count any more: %s", ablation_id, error)
            continue
        for arm, digest in asked.items():
            own = (stored.c.ablation_id == ablation_id) & (stored.c.arm == arm)
            connection.execute(sa.update(stored).where(own).values(digest=digest))
