"""One ablation with everything stored about it, as the report and the MLflow sink read it."""

from sqlalchemy import Connection, select

from experiments.analysis.verdicts import Verdict
from experiments.design.plan import Plan
from experiments.records.receipts import Receipt
from experiments.reporting.view import AblationView, TrialView
from service.errors import NotFound
from service.store.columns import rfc3339
from service.store.tables import ablations, receipts, trials


def ablation_view(connection: Connection, ablation_id: str) -> AblationView:
    """Load an ablation whole. Raises NotFound."""
    row = connection.execute(select(ablations).where(ablations.c.id == ablation_id)).first()
    if row is None:
        raise NotFound(f"there is no ablation {ablation_id!r}")
    return AblationView(
        ablation_id=row.id,
        name=row.name,
        question=row.question,
        state=row.state,
        created_at=rfc3339(row.created_at),
        spec_text=row.spec_text,
        spec_digest=row.spec_digest,
        plan=Plan.model_validate_json(row.plan),
        verdict=None if row.verdict is None else Verdict.model_validate_json(row.verdict),
        trials=_trials(connection, ablation_id),
    )


def _trials(connection: Connection, ablation_id: str) -> tuple[TrialView, ...]:
    query = (
        select(trials, receipts.c.payload)
        .outerjoin(receipts, receipts.c.trial_id == trials.c.id)
        .where(trials.c.ablation_id == ablation_id)
        .order_by(trials.c.block_index, trials.c.position)
    )
    return tuple(
        TrialView(
            trial_id=row.id,
            block_index=row.block_index,
            arm=row.arm,
            position=row.position,
            state=row.state,
            attempt_id=row.attempt_id,
            receipt=None if row.payload is None else Receipt.model_validate_json(row.payload),
        )
        for row in connection.execute(query)
    )
