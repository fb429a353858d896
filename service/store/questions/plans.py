"""Plans that a service registered before they were carried away: each is an asking, even if nothing is imported."""

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from ablate.experiments.design.plan import questions
from ablate.experiments.records.circumstances import Countersignature
from ablate.experiments.records.plan_file import PlanFile, countersign
from ablate.service.errors import ImportedOtherwise
from ablate.service.store.access import keys
from ablate.service.store.questions.circumstances import family_of
from ablate.service.store.session import Store
from ablate.service.store.tables import db_now, registered_plans, registered_questions, rfc3339


def register(store: Store, file: PlanFile, *, by: str) -> Countersignature:
    """Store a plan once, with its questions; return its countersignature. Raises ImportedOtherwise for another plan."""
    try:
        with store.write() as connection:
            _store(connection, file, by=by)
    except IntegrityError:  # it is registered
        pass
    with store.read() as connection:
        row = find(connection, file.ablation_id)
    if row is None or row.digest != file.digest:
        raise ImportedOtherwise(f"another plan is registered as ablation {file.ablation_id}; nothing was changed")
    return Countersignature.model_validate_json(row.countersignature)


def find(connection: Connection, ablation_id: str) -> Row[Any, Any] | None:
    """Return digest and countersignature of a registered plan, None without one."""
    query = select(registered_plans.c.digest, registered_plans.c.countersignature)
    return connection.execute(query.where(registered_plans.c.ablation_id == ablation_id)).first()


def _store(connection: Connection, file: PlanFile, *, by: str) -> None:
    own = {"ablation_id": file.ablation_id}
    plan = {"name": file.plan.ablation, "digest": file.digest, "registered_at": db_now(), "registered_by": by}
    connection.execute(insert(registered_plans).values(**own, **plan))
    asked = [{**own, "arm": arm, "digest": digest} for arm, digest in questions(file.spec, file.plan).items()]
    if asked:
        connection.execute(insert(registered_questions), asked)
    mine = registered_plans.c.ablation_id == file.ablation_id
    moment = connection.execute(select(registered_plans.c.registered_at).where(mine)).scalar_one()
    signed = countersign(
        file,
        keys.service_signer(connection),
        registered_at=rfc3339(moment),
        family=family_of(connection, file.ablation_id),
    )
    connection.execute(update(registered_plans).where(mine).values(countersignature=signed.model_dump_json()))
