"""Results of an ablation: its verdict, report and place in MLflow, and the view that they are computed from."""

import threading
from collections.abc import Sequence
from typing import Any

from cachetools import LRUCache, cached
from sqlalchemy import Connection, Row, Select, select, update

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import Plan
from ablate.experiments.outcomes import AblationState, Outcome, TrialState
from ablate.experiments.records.receipts import Receipt
from ablate.experiments.reporting.verdict_layout import short_answer
from ablate.experiments.reporting.view import AblationView, TrialView
from ablate.service.lifecycle import OVER, TRIAL_OVER, EventKind, OutboxKind
from ablate.service.schemas.submissions import SpecBody
from ablate.service.store import outbox
from ablate.service.store.ablations import sessions
from ablate.service.store.ablations.ablations import get_whole, spec_texts
from ablate.service.store.blocks.completion import NOT_SHOWN, failed_reason
from ablate.service.store.blocks.transitions import Transitions, lock_ablation
from ablate.service.store.session import Store
from ablate.service.store.tables import ablations, blocks, receipts, rfc3339, trials

_KEPT_METRICS = 64
_REPORTED = ablations.c.report_html.is_not(None).label("reported")


def read_spec(connection: Connection, ablation_id: str) -> SpecBody:
    """Return the stored spec."""
    text, content_type = spec_texts(connection, [ablation_id])[ablation_id]
    return SpecBody(content=text.encode(), content_type=content_type)


@cached(LRUCache(_KEPT_METRICS), condition=threading.Condition())
def deciding_metric(store: Store, ablation_id: str) -> str:
    """Return the name of the metric that decides, from a cache: specs never change."""
    with store.read() as connection:
        body = read_spec(connection, ablation_id)
    return parse_spec(body.content, body.content_type).verdict.primary.metric


def store_verdict(connection: Connection, ablation_id: str, verdict: Verdict) -> None:
    """Store the verdict with its event, unless there is one, settle a proposal, and ask for the report."""
    words = {variant.arm: str(variant.verdict) for variant in verdict.variants}
    state = lock_ablation(connection, ablation_id)
    first = update(ablations).where(ablations.c.id == ablation_id, ablations.c.verdict.is_(None))
    has_failed = state == AblationState.FAILED
    answer = failed_reason(connection, ablation_id) if has_failed else short_answer(verdict)
    if connection.execute(first.values(verdict=verdict.model_dump_json(), answer=answer)).rowcount:
        transitions = Transitions(connection, ablation_id, actor="judge", locked=state)
        transitions.add_event(EventKind.VERDICT, ablation_id, reason="every block ended", data={"variants": words})
        transitions.flush()
        sessions.settle(connection, ablation_id, verdict)
    outbox.add(connection, OutboxKind.REPORT, ablation_id)


def store_report(connection: Connection, ablation_id: str, html: str) -> None:
    """Store the report and ask for the projection, which goes last if there is no verdict."""
    own = ablations.c.id == ablation_id
    connection.execute(update(ablations).where(own).values(report_html=html))
    # RETURNING is no alternative: SQLite 3.40 evaluates IS NOT NULL there as if the column had a NOT NULL constraint.
    judged = connection.scalar(select(ablations.c.verdict.is_not(None)).where(own))
    rank = outbox.Rank.FIRST if judged else outbox.Rank.LATER
    outbox.add(connection, OutboxKind.PROJECT, ablation_id, rank=rank)


def ask_for_projections(connection: Connection) -> int:
    """Forget the places of all ablations in MLflow and ask for every projection; return their number."""
    rows = connection.execute(select(ablations.c.id, ablations.c.state, _REPORTED).order_by(ablations.c.id)).all()
    kinds = {row.id: OutboxKind.PROJECT if row.reported else OutboxKind.ANNOUNCE for row in rows if _is_shown(row)}
    connection.execute(update(ablations).values(**NOT_SHOWN))
    for ablation_id, kind in kinds.items():
        outbox.add(connection, kind, ablation_id, rank=outbox.Rank.LATER)
    return len(kinds)


def _is_shown(row: Row[Any]) -> bool:
    """Return whether MLflow should show an ablation: it has its report, or it is not over."""
    return row.reported or row.state not in OVER


def read_report(connection: Connection, ablation_id: str) -> str | None:
    """Return the stored report, None while there is none."""
    query = select(ablations.c.report_html).where(ablations.c.id == ablation_id)
    html: str | None = connection.execute(query).scalar_one()
    return html


def store_projection(connection: Connection, ablation_id: str, *, experiment_id: str, run_id: str, whole: bool) -> None:
    """Store the place of the ablation in MLflow; if it is not there as a `whole`, only while it is not over."""
    values = {"mlflow_experiment_id": experiment_id, "mlflow_run_id": run_id}
    row = update(ablations).where(ablations.c.id == ablation_id)
    connection.execute((row if whole else row.where(ablations.c.state.not_in(OVER))).values(**values))


def latest_experiment(connection: Connection) -> str | None:
    """Return the MLflow experiment of the newest ablation that is shown there, or None."""
    shown = select(ablations.c.mlflow_experiment_id).where(ablations.c.mlflow_experiment_id.is_not(None))
    experiment: str | None = connection.scalar(shown.order_by(ablations.c.id.desc()).limit(1))
    return experiment


def ablation_view(connection: Connection, ablation_id: str) -> AblationView:
    """Return an ablation with its plan, verdict, trials and receipts. Raises NotFound."""
    row = get_whole(connection, ablation_id)
    return AblationView(
        ablation_id=row.id,
        name=row.name,
        question=row.question,
        state=AblationState(row.state),
        created_at=rfc3339(row.created_at),
        spec_text=row.spec_text,
        content_type=row.content_type,
        spec_digest=row.spec_digest,
        plan=Plan.model_validate_json(row.plan),
        verdict=None if row.verdict is None else Verdict.model_validate_json(row.verdict),
        trials=_trials(connection, ablation_id),
    )


def _trials(connection: Connection, ablation_id: str) -> tuple[TrialView, ...]:
    query = (
        select(trials, receipts.c.payload, blocks.c.attempt_id, blocks.c.message)
        .join(blocks, blocks.c.id == trials.c.block_id)
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
            state=TrialState(row.state),
            attempt_id=row.attempt_id,
            receipt=None if row.payload is None else Receipt.model_validate_json(row.payload),
            reason=row.message if row.state in TRIAL_OVER and row.payload is None else None,
        )
        for row in connection.execute(query)
    )


def newest_receipts(connection: Connection, ablation_id: str, *, num_blocks: int) -> Sequence[Row[Any]]:
    """Return arm, block, trial and digest of the measured trials in the newest `num_blocks` finished blocks."""
    own = (trials.c.ablation_id == ablation_id, trials.c.outcome == Outcome.MEASURED)
    newest = select(trials.c.block_index).where(*own).distinct().order_by(trials.c.block_index.desc()).limit(num_blocks)
    columns = (trials.c.arm, trials.c.block_index, trials.c.id.label("trial_id"), receipts.c.digest)
    query: Select[Any] = select(*columns).join(receipts, receipts.c.trial_id == trials.c.id).where(*own)
    shown = query.where(trials.c.block_index.in_(newest.scalar_subquery()))
    return connection.execute(shown.order_by(trials.c.block_index, trials.c.position)).all()


def traced_trials(connection: Connection, ablation_id: str) -> Sequence[Row[Any]]:
    """Return arm and id of the trials whose receipt has a profiled step over time, in the order in which they ran."""
    query: Select[Any] = select(trials.c.arm, trials.c.id.label("trial_id")).join(
        receipts, receipts.c.trial_id == trials.c.id
    )
    in_first = (trials.c.ablation_id == ablation_id, trials.c.block_index == 0)
    has_trace = receipts.c.payload.contains('"step_trace":{', autoescape=True)
    return connection.execute(query.where(*in_first, has_trace).order_by(trials.c.position)).all()


def read_payload(connection: Connection, trial_id: str) -> str:
    """Return the stored JSON of a trial's receipt."""
    return str(connection.execute(select(receipts.c.payload).where(receipts.c.trial_id == trial_id)).scalar_one())
