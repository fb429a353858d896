"""Sessions and their proposals: whose turn it is, at which level, and the incumbent that a kept proposal leaves.

One proposal at a time: its answer decides the incumbent and the level of the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from ablate.experiments.analysis.proposals import NOTE, outcome_of, with_kept
from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.design.problems import nearest
from ablate.experiments.design.spec import AblationSpec
from ablate.experiments.design.verdict_rule import MAX_KEPT
from ablate.experiments.outcomes import AblationState, ProposalOutcome
from ablate.service.errors import NameTaken, NotFound, NotOwner, SessionBusy, SessionClosed
from ablate.service.principals import Principal, Scope
from ablate.service.store.ablations.submissions import Submission
from ablate.service.store.tables import ablations, db_now, labels, proposals, sessions


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The next proposal of a session."""

    number: int
    kept: tuple[int, ...]
    """Numbers of the proposals that were kept so far."""
    spec_text: str
    """YAML of a spec whose baseline is the incumbent."""


def open_session(connection: Connection, name: str, spec: AblationSpec, text: str, principal: Principal) -> None:
    """Open a session whose incumbent is the baseline of `spec`, `text` in YAML. Repeating it changes nothing.

    Raises NameTaken.
    """
    row = {
        "name": name,
        "spec_text": text,
        "metric": spec.verdict.primary.metric,
        "node_class": spec.placement.node_class,
        "opened_by": principal.name,
        "token_id": principal.token_id,
        "created_at": db_now(),
    }
    same = (sessions.c[column] == row[column] for column in ("name", "spec_text", "token_id"))
    query = select(sessions.c.name).where(*same, sessions.c.closed_at.is_(None))
    if connection.scalar(query) and not list_proposals(connection, name):
        return
    try:
        connection.execute(insert(sessions).values(row))
    except IntegrityError as error:
        raise NameTaken(f"there is a session '{name}'; its budget belongs to its own proposals") from error


def get_session(connection: Connection, name: str) -> Row[Any]:
    """Return a session. Raises NotFound, with the nearest name."""
    row = connection.execute(select(sessions).where(sessions.c.name == name)).first()
    if row is None:
        raise NotFound(_no_session(connection, name))
    return row


def _no_session(connection: Connection, name: str) -> str:
    hint = nearest(name, connection.scalars(select(sessions.c.name)))
    return f"there is no session '{name}'; {hint or f'open it: ablate sessions open {name} SPEC'}"


def list_sessions(connection: Connection) -> Sequence[Row[Any]]:
    """Return all sessions, newest first."""
    return connection.execute(select(sessions).order_by(sessions.c.created_at.desc(), sessions.c.name)).all()


def list_proposals(connection: Connection, name: str | None = None) -> Sequence[Row[Any]]:
    """Return the proposals of a session, or of all, in order, with name, state and answer of their ablations."""
    columns = (ablations.c.name, ablations.c.state, ablations.c.answer, ablations.c.created_at)
    noted = (labels.c.ablation_id == proposals.c.ablation_id) & (labels.c.key == NOTE)
    query: Select[Any] = select(proposals, *columns, labels.c.value.label("note"))
    query = query.join(ablations, ablations.c.id == proposals.c.ablation_id).outerjoin(labels, noted)
    if name is not None:
        query = query.where(proposals.c.session == name)
    return connection.execute(query.order_by(proposals.c.session, proposals.c.number)).all()


def session_of(connection: Connection, ablation_id: str) -> str | None:
    """Return the session of which this ablation is a proposal; None for others."""
    name: str | None = connection.scalar(select(proposals.c.session).where(proposals.c.ablation_id == ablation_id))
    return name


def outcome(row: Row[Any]) -> ProposalOutcome | None:
    """Return the answer to a proposal of `list_proposals`; None while it is measured."""
    if row.outcome is not None:
        return ProposalOutcome(row.outcome)
    # a cancelled ablation has no verdict
    return ProposalOutcome.UNDECIDED if row.state == AblationState.CANCELLED else None


def next_turn(connection: Connection, principal: Principal, name: str) -> Turn:
    """Return the next proposal of a session. Raises NotFound, NotOwner, SessionClosed, SessionBusy."""
    row = get_session(connection, name)
    _check_owner(row, principal)
    if row.closed_at is not None:
        raise SessionClosed(f"session '{name}' is closed; it takes no proposals")
    earlier = list_proposals(connection, name)
    running = next((one for one in earlier if outcome(one) is None), None)
    if running is not None:
        raise SessionBusy(
            f"proposal {running.number} of session '{name}' is {running.state} ({running.ablation_id}); its answer "
            "decides the incumbent and the level of the next one",
            headers={"Retry-After": "5"},
        )
    kept = tuple(one.number for one in earlier if outcome(one) is ProposalOutcome.KEEP)
    if len(kept) >= MAX_KEPT:
        raise SessionClosed(f"session '{name}' has kept {MAX_KEPT:,} proposals, the most of one session; open another")
    return Turn(number=len(earlier) + 1, kept=kept, spec_text=row.spec_text)


def take_turn(connection: Connection, principal: Principal, submission: Submission, *, expected: Turn) -> None:
    """Store the submission as the proposal that its spec names, which spends the level.

    Locks the session, so two clients cannot take one level. Raises SessionBusy if the session has changed since
    `expected` was read.
    """
    session, ablation_id = submission.spec.verdict.session, submission.ablation_id
    if session is None:
        raise AssertionError("a proposal without a session")
    locked = select(sessions.c.name).where(sessions.c.name == session.name).with_for_update(key_share=True)
    connection.execute(locked)
    if next_turn(connection, principal, session.name) != expected:
        raise SessionBusy(f"another proposal of session '{session.name}' came first; send this one again")
    row = {"session": session.name, "number": session.proposal, "ablation_id": ablation_id, "level": session.level}
    connection.execute(insert(proposals).values(row))


def settle(connection: Connection, ablation_id: str, verdict: Verdict) -> None:
    """Store the answer to a proposal, and make a kept one the incumbent; other ablations change nothing."""
    own = proposals.c.ablation_id == ablation_id
    session = session_of(connection, ablation_id)
    if session is None:
        return
    answer = outcome_of(verdict)
    connection.execute(update(proposals).where(own).values(outcome=answer.value))
    if answer is ProposalOutcome.KEEP:
        incumbent = get_session(connection, session).spec_text
        kept = connection.execute(select(ablations.c.spec_text).where(ablations.c.id == ablation_id)).scalar_one()
        text = with_kept(incumbent.encode(), kept.encode()).decode()
        connection.execute(update(sessions).where(sessions.c.name == session).values(spec_text=text))


def close_session(connection: Connection, principal: Principal, name: str) -> None:
    """Close a session; a running proposal ends by itself. A second call changes nothing. Raises NotFound, NotOwner."""
    _check_owner(get_session(connection, name), principal)
    closed_at = func.coalesce(sessions.c.closed_at, db_now())
    connection.execute(update(sessions).where(sessions.c.name == name).values(closed_at=closed_at))


def _check_owner(row: Row[Any], principal: Principal) -> None:
    if row.token_id != principal.token_id and not principal.scope.includes(Scope.OPERATE):
        raise NotOwner(
            f"session '{row.name}' was opened by '{row.opened_by}', and its budget is theirs; token "
            f"'{principal.name}' may use only its own sessions, a token with scope 'operate' all"
        )
