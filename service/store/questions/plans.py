"""Plans that a service registered before they were carried away: each is an asking, even if nothing is imported."""

import json
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from ablate.experiments.design.plan import draw_seeds, questions, seeds_of
from ablate.experiments.outcomes import SeedOrigin
from ablate.experiments.records.circumstances import Family, Registration
from ablate.experiments.records.plan_file import PlanFile, registered_file
from ablate.service.errors import ImportedOtherwise
from ablate.service.schemas.submissions import PlanRegistered
from ablate.service.store.questions.circumstances import family_of
from ablate.service.store.session import Store
from ablate.service.store.tables import db_now, registered_plans, registered_questions, rfc3339


def register(store: Store, file: PlanFile, *, by: str) -> PlanRegistered:
    """Store a plan once, with its questions and the seeds that are drawn now; return what completes it.

    Raises ImportedOtherwise for another plan.
    """
    try:
        with store.write() as connection:
            _store(connection, file, by=by)
    except IntegrityError:  # it is registered
        pass
    with store.read() as connection:
        row = find(connection, file.ablation_id)
    if row is None or row.sent_digest != file.digest:
        raise ImportedOtherwise(f"another plan is registered as ablation {file.ablation_id}; nothing was changed")
    return PlanRegistered(registered=_registration(row), seeds=json.loads(row.seeds), digest=row.digest)


def find(connection: Connection, ablation_id: str) -> Row[Any] | None:
    """Return a registered plan, None without one."""
    return connection.execute(select(registered_plans).where(registered_plans.c.ablation_id == ablation_id)).first()


def _registration(row: Row[Any]) -> Registration:
    return Registration(registered_at=rfc3339(row.registered_at), family=Family.model_validate_json(row.family))


def _store(connection: Connection, file: PlanFile, *, by: str) -> None:
    own, drawn = {"ablation_id": file.ablation_id}, draw_seeds(file.plan)
    seeds = [] if drawn.seeds is SeedOrigin.CHOSEN else seeds_of(drawn)
    row = {
        "name": file.plan.ablation,
        "sent_digest": file.digest,
        "digest": file.digest,
        "seeds": json.dumps(seeds),
        "family": Family().model_dump_json(),
        "registered_at": db_now(),
        "registered_by": by,
    }
    connection.execute(insert(registered_plans).values(**own, **row))
    asked = [{**own, "arm": arm, "digest": digest} for arm, digest in questions(file.spec, file.plan).items()]
    if asked:
        connection.execute(insert(registered_questions), asked)
    mine = registered_plans.c.ablation_id == file.ablation_id
    family = family_of(connection, file.ablation_id)
    moment = connection.execute(select(registered_plans.c.registered_at).where(mine)).scalar_one()
    registration = Registration(registered_at=rfc3339(moment), family=family)
    digest = registered_file(file, seeds, registration).digest
    connection.execute(update(registered_plans).where(mine).values(digest=digest, family=family.model_dump_json()))
