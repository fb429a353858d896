"""The pages of sessions: all of them, and the path of one from its first baseline to the incumbent."""

from dataclasses import dataclass

from sqlalchemy import Connection

from ablate.experiments.outcomes import ProposalOutcome
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.pages.first_screen import LONGEST_CHANGE
from ablate.experiments.reporting.table import Cell, Table, Tone, numbers, row, texts
from ablate.experiments.reporting.wording import shorten
from ablate.service.http.links import below
from ablate.service.principals import Principal
from ablate.service.routes.sessions import all_sessions, session_path
from ablate.service.schemas.sessions import ProposalPublic, SessionPath, SessionPublic
from ablate.service.settings import ServiceSettings

_TONES = {
    ProposalOutcome.KEEP: Tone.GOOD,
    ProposalOutcome.DISCARD: Tone.BAD,
    ProposalOutcome.UNDECIDED: Tone.OPEN,
}
_SIGNS = {ProposalOutcome.KEEP: "✓", ProposalOutcome.DISCARD: "✗", ProposalOutcome.UNDECIDED: "?"}
_SPENT = "A proposal spends its level whatever its answer is. Only a kept one gives some back."


@dataclass(frozen=True, kw_only=True)
class SessionPage:
    """The whole page of a session."""

    session: SessionPath
    lead: str
    path: Table


def session_page(connection: Connection, name: str, principal: Principal, settings: ServiceSettings) -> SessionPage:
    """Read the page of a session. Raises NotFound."""
    session = session_path(connection, name, principal, settings)
    counted = f"{session.kept:,} of {wording.counted(session.proposals, 'proposal')} kept"
    incumbent = f"proposal {session.incumbent}" if session.incumbent else "the baseline that opened the session"
    lead = f"{counted}. The incumbent is {incumbent}. "
    closed = "The session is closed." if session.closed_at else f"The next proposal is tested at {_level(session)}."
    columns = (
        *numbers("proposal"),
        *texts("change", "outcome", "answer", "against"),
        *numbers("level"),
        *texts("when"),
    )
    return SessionPage(
        session=session,
        lead=lead + closed,
        path=Table(title="Path", columns=columns, rows=tuple(_rows(session)), note=_SPENT + _again(session)),
    )


def _again(session: SessionPath) -> str:
    command = f"ablate sessions spec {session.name} --whole"
    return (
        f" Kept effects tend to be too large: the spec of {command} measures all of them again." if session.kept else ""
    )


def _level(session: SessionPublic) -> str:
    return f"{100 * session.next_level:.2g} %"


def _rows(session: SessionPath) -> list[tuple[Cell, ...]]:
    """Return a row for each proposal, newest first, with the incumbent that it was compared with."""
    rows, incumbent = [], 0
    for one in session.path:
        link = below(f"/a/{one.ablation_id}")
        change = Cell(text=shorten(one.change, LONGEST_CHANGE) or one.name, link=link, note=one.note or "")
        against = f"proposal {incumbent}" if incumbent else "first baseline"
        level, when = f"{100 * one.level:.2g} %", wording.ago(one.created_at)
        rows.append(
            row(f"{one.number:,}", change, _outcome(one), _without_name(one.answer or ""), against, level, when)
        )
        incumbent = one.number if one.outcome is ProposalOutcome.KEEP else incumbent
    return rows[::-1]


def _without_name(answer: str) -> str:
    """Return an answer without the name of the variant, beside whose change it stands."""
    return answer.partition(" ")[2] or answer


def _outcome(one: ProposalPublic) -> Cell:
    if one.outcome is None:
        return Cell(text=str(one.state), tone=Tone.NEUTRAL)
    return Cell(text=str(one.outcome), sign=_SIGNS[one.outcome], tone=_TONES[one.outcome])


def sessions_table(connection: Connection) -> Table:
    """Return the table of all sessions, newest first."""
    rows = [
        row(
            Cell(text=one.name, link=below(f"/sessions/{one.name}")),
            one.state,
            f"{one.proposals:,}",
            f"{one.kept:,}",
            _level(one),
            one.metric,
            one.node_class,
            one.opened_by,
            wording.moment(one.created_at),
        )
        for one in all_sessions(connection)
    ]
    columns = (
        *texts("session", "state"),
        *numbers("proposals", "kept", "next level"),
        *texts("metric", "node class", "opened by", "opened"),
    )
    return Table(title="Proposals and error budgets", columns=columns, rows=tuple(rows), note=_SPENT)
