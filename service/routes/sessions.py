"""Routes of sessions: open, list, show, close, and propose a variant against the incumbent."""

import time
from collections import defaultdict
from collections.abc import Sequence
from http import HTTPStatus
from io import BytesIO
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from sqlalchemy import Connection, Row

from ablate.experiments.analysis.noise.admission import is_enough, mending_command, standing_problems
from ablate.experiments.analysis.proposals import (
    as_yaml,
    opening_problems,
    proposal_problems,
    proposed,
    refuse_session_key,
    since_the_first,
    small_margin,
)
from ablate.experiments.analysis.sizing import workload_of
from ablate.experiments.design.aa_spec import ADMITTING_BLOCKS, CONTENT_TYPE, calibration_spec
from ablate.experiments.design.load import parse_spec
from ablate.experiments.design.plan import make_plan
from ablate.experiments.design.power import session_level
from ablate.experiments.design.problems import pointer
from ablate.experiments.design.program_files import SentCode
from ablate.experiments.design.spec import MIN_BLOCKS, AblationSpec
from ablate.experiments.design.spec_values import NAME_PATTERN
from ablate.experiments.design.workload import Workload
from ablate.experiments.errors import CodeArchiveError, SpecError, SpecProblem
from ablate.experiments.outcomes import ProposalOutcome
from ablate.experiments.records.code_archive import file_digests
from ablate.experiments.records.spec_code import copied_detail
from ablate.experiments.reporting.changes import changes_in_spec, in_one_line
from ablate.service.http.deps import LongRoute, Reader, Services, ServicesDep, SpecBodyDep, Submitter
from ablate.service.http.responses import secured
from ablate.service.principals import Principal
from ablate.service.routes.submissions import (
    HEADERS,
    SPEC_BODY,
    IdempotencyHeader,
    answered_once,
    key_of,
)
from ablate.service.schemas.sessions import ProposalAccepted, ProposalPublic, SessionList, SessionPath, SessionPublic
from ablate.service.schemas.submissions import SpecBody
from ablate.service.settings import ServiceSettings
from ablate.service.store.ablations import ablations, sessions
from ablate.service.store.ablations.device_minutes import expected_device_minutes
from ablate.service.store.ablations.submissions import IdempotencyKey, StoredAnswer, Submission
from ablate.service.store.files import code_archives
from ablate.service.store.nodes.calibrations import read_calibrations
from ablate.service.store.tables import rfc3339
from ablate.service.submitting import accepted, check_code_scope, on_one_class, prepared, stored

router = APIRouter(prefix="/v1", tags=["sessions"], route_class=LongRoute)

SessionName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=63, examples=["night-shift"])]


@router.get("/sessions", operation_id="listSessions", summary="List sessions", responses=secured())
def list_sessions(services: ServicesDep, principal: Reader) -> SessionList:
    """Return all sessions, newest first."""
    with services.store.read() as connection:
        return SessionList(items=all_sessions(connection))


def all_sessions(connection: Connection) -> list[SessionPublic]:
    """Return all sessions, newest first."""
    by_session = defaultdict(list)
    for row in sessions.list_proposals(connection):
        by_session[row.session].append(row)
    return [_public(row, by_session[row.name]) for row in sessions.list_sessions(connection)]


@router.get("/sessions/{name:word}", operation_id="getSession", summary="Show a session", responses=secured(404, 422))
def get_session(name: SessionName, services: ServicesDep, principal: Reader) -> SessionPath:
    """Return a session, all its proposals, and a spec to begin the next one with."""
    with services.store.read() as connection:
        return session_path(connection, name, principal, services.settings)


def session_path(connection: Connection, name: str, principal: Principal, settings: ServiceSettings) -> SessionPath:
    """Return a session with its proposals, without digests of code that the principal may not use. Raises NotFound."""
    row, rows = sessions.get_session(connection, name), sessions.list_proposals(connection, name)
    changes = _changes(connection, rows)
    path = [_proposal(one, changes[one.ablation_id]) for one in rows]
    text = code_archives.shown_spec(connection, row.spec_text, principal)
    advice = None if row.closed_at is not None else _advice(connection, row, settings)
    public, whole = _public(row, rows), None
    if public.kept:
        first, _ = ablations.spec_texts(connection, [rows[0].ablation_id])[rows[0].ablation_id]
        whole = code_archives.shown_spec(
            connection, since_the_first(first.encode(), row.spec_text.encode()).decode(), principal
        )
    return SessionPath(**public.model_dump(), path=path, spec=text, whole=whole, advice=advice)


def _public(row: Row[Any], proposals: Sequence[Row[Any]]) -> SessionPublic:
    kept = [one.number for one in proposals if sessions.outcome(one) is ProposalOutcome.KEEP]
    running = next((one.ablation_id for one in proposals if sessions.outcome(one) is None), None)
    return SessionPublic(
        name=row.name,
        state="open" if row.closed_at is None else "closed",
        metric=row.metric,
        node_class=row.node_class,
        opened_by=row.opened_by,
        created_at=rfc3339(row.created_at),
        closed_at=None if row.closed_at is None else rfc3339(row.closed_at),
        incumbent=max(kept, default=0),
        proposals=len(proposals),
        kept=len(kept),
        running=running,
        next_level=session_level(len(proposals) + 1, kept),
    )


def _changes(connection: Connection, rows: Sequence[Row[Any]]) -> dict[str, str]:
    """Return what each proposal changes, by its ablation."""
    texts = ablations.spec_texts(connection, [row.ablation_id for row in rows])
    arms = {one: changes_in_spec(*text).values() for one, text in texts.items()}
    return {one: "; ".join(in_one_line(arm.changes) for arm in own) for one, own in arms.items()}


def _proposal(row: Row[Any], change: str) -> ProposalPublic:
    values = {
        name: getattr(row, name) for name in ("number", "ablation_id", "name", "state", "level", "answer", "note")
    }
    values |= {"change": change, "outcome": sessions.outcome(row), "created_at": rfc3339(row.created_at)}
    return ProposalPublic(**values)


@router.post(
    "/sessions/{name:word}:open",
    operation_id="openSession",
    summary="Open a session",
    status_code=HTTPStatus.CREATED,
    responses=secured(404, 409, 413, 415, 422),  # 404: a name with / or : is another path
    openapi_extra=SPEC_BODY,
)
def open_session(name: SessionName, body: SpecBodyDep, services: ServicesDep, principal: Submitter) -> SessionPath:
    """Make the spec's baseline the incumbent of a new session. Workload, placement and rule hold for all proposals.

    Nothing runs. The spec's variants are not proposed.
    """
    spec = parse_spec(body.content, body.content_type)
    refuse_session_key(spec)
    check_code_scope(spec, principal)
    content, content_type, spec = on_one_class(services, body, spec)
    problems = list(opening_problems(spec))
    if problems:
        raise SpecError(problems)
    if not spec.design.blocks.auto:  # `auto` has no number before a calibration
        make_plan(spec)
    text = as_yaml(content, content_type).decode()
    with services.store.write() as connection:
        sessions.open_session(connection, name, spec, text, principal)
    with services.store.read() as connection:
        return session_path(connection, name, principal, services.settings)


@router.post(
    "/sessions/{name:word}:close", operation_id="closeSession", summary="Close a session", responses=secured(404, 422)
)
def close_session(name: SessionName, services: ServicesDep, principal: Submitter) -> SessionPath:
    """Take no more proposals; a running one ends by itself. Repeating it changes nothing.

    Operators close any session, others only their own.
    """
    with services.store.write() as connection:
        sessions.close_session(connection, principal, name)
    with services.store.read() as connection:
        return session_path(connection, name, principal, services.settings)


@router.post(
    "/sessions/{name:word}:try",
    operation_id="tryProposal",
    summary="Propose a variant",
    status_code=HTTPStatus.ACCEPTED,
    response_model=ProposalAccepted,
    responses={
        202: {"description": "Stored, and its level is spent; it runs when a node is free.", "headers": HEADERS},
        **secured(400, 404, 409, 413, 415, 422),
    },
    openapi_extra=SPEC_BODY,
)
def try_proposal(
    request: Request,
    name: SessionName,
    body: SpecBodyDep,
    services: ServicesDep,
    principal: Submitter,
    idempotency_key: IdempotencyHeader,
) -> Response:
    """Submit the spec's one variant as the next proposal, against the incumbent, at the level of the session's budget.

    The spec's baseline is the incumbent (`GET /v1/sessions/{name}` has its spec). One proposal runs at a time.
    """
    spec = parse_spec(body.content, body.content_type)
    refuse_session_key(spec)
    key = key_of(principal, idempotency_key, body, session=name)
    return answered_once(services, key, lambda: _try(services, key, name, body, spec, principal))


def _try(
    services: Services, key: IdempotencyKey, name: str, body: SpecBody, spec: AblationSpec, principal: Principal
) -> StoredAnswer:
    with services.store.read() as connection:
        turn = sessions.next_turn(connection, principal, name)
    problems = list(proposal_problems(spec, parse_spec(turn.spec_text.encode(), CONTENT_TYPE), name))
    if problems:
        raise SpecError(problems)
    _check_hidden(services, name, spec, principal)
    text, proposal = proposed(body.content, body.content_type, spec, name, number=turn.number, kept=turn.kept)
    submission = prepared(services, SpecBody(content=text, content_type=CONTENT_TYPE), proposal, principal)
    if submission.plan.control is None:
        with services.store.read() as connection:
            _check_calibrated(connection, submission, name)
    answer = accepted(services, submission)
    if submission.spec.design.seeds != spec.design.seeds:
        more = "the seeds of its spec are not used: the metric is judged over seeds, so each proposal has drawn ones"
        answer = answer.model_copy(update={"warnings": [*answer.warnings, more]})
    whole = ProposalAccepted(
        session=name,
        number=turn.number,
        level=submission.spec.verdict.level_of(1),
        incumbent=max(turn.kept, default=0),
        accepted=answer,
    )
    return stored(
        services,
        submission,
        key,
        StoredAnswer(ablation_id=submission.ablation_id, text=whole.model_dump_json()),
        principal,
        also=lambda connection: sessions.take_turn(connection, principal, submission, expected=turn),
    )


def _check_hidden(services: Services, name: str, spec: AblationSpec, principal: Principal) -> None:
    """Raise SpecError if a proposal's code has files of the evaluation that no baseline of the session has had."""
    ((variant, own),) = spec.variants.items()
    evaluate = spec.workload.evaluate
    if evaluate is None or not isinstance(evaluate.code, SentCode) or not isinstance(own.code, SentCode):
        return
    with services.store.read() as connection:
        rows = sessions.list_proposals(connection, name)[:1]
        texts = ablations.spec_texts(connection, [row.ablation_id for row in rows])
        codes = [parse_spec(text.encode(), kind).workload.code for text, kind in texts.values()]
        before = {code.archive for code in (spec.workload.code, *codes) if isinstance(code, SentCode)}
        wanted = {evaluate.code.archive, own.code.archive, *before}
        usable = code_archives.usable_by(connection, wanted, user=code_archives.user_of(principal))
    if evaluate.code.archive in before or not usable >= {evaluate.code.archive, own.code.archive}:
        return  # it never was hidden; or the submission is refused, because it may not use them
    files = {one: _digests(services, one) for one in sorted(usable)}
    hidden = set(files[evaluate.code.archive].values())
    hidden.difference_update(*(files[one].values() for one in sorted(before & usable)))
    names = [one for one, digest in files[own.code.archive].items() if digest in hidden]
    if names:
        hint = "take them out of the folder, or type `ablate try` in a folder that does not have them"
        problem = SpecProblem(pointer=pointer("variants", variant, "code"), detail=copied_detail(names), hint=hint)
        raise SpecError([problem])


def _digests(services: Services, archive: str) -> dict[str, str]:
    """Return the digest of each file of an archive; none if it is dropped. Raises SpecError if it cannot be read."""
    content = b"".join(code_archives.read_pieces(services.store, archive))
    try:
        return file_digests(BytesIO(content)) if content else {}
    except CodeArchiveError as error:
        detail = f"{archive}: {error}"
        raise SpecError(
            [SpecProblem(pointer=pointer("variants"), detail=detail, hint="send the folder again")]
        ) from error


def _measuring(node_class: str, session: str) -> str:
    """Return the commands that measure the noise for the proposals of a session."""
    return f"ablate sessions spec {session} > next.yaml; {mending_command(node_class, 'next.yaml')}"


def _advice(connection: Connection, row: Row[Any], settings: ServiceSettings) -> str | None:
    """Say what proposals lack; None if nothing."""
    incumbent = parse_spec(row.spec_text.encode(), CONTENT_TYPE)
    noise = _noise_advice(connection, row, incumbent, settings) if incumbent.verdict.timed else None
    return " ".join(filter(None, (noise, _unprotected(row.metric, incumbent.workload)))) or None


def _noise_advice(
    connection: Connection, row: Row[Any], incumbent: AblationSpec, settings: ServiceSettings
) -> str | None:
    """Say which A/A blocks proposals lack and how long they take to measure, or that the margin is small; or None."""
    node_class = incumbent.placement.node_class
    text = calibration_spec(incumbent, node_class=node_class, blocks=ADMITTING_BLOCKS, order_seed=0)
    spec = parse_spec(text, CONTENT_TYPE)
    plan = make_plan(spec)
    own = read_calibrations(connection, workload=workload_of(plan, spec))
    enough = [one for one in own if is_enough(one, time.time())]
    if enough:
        return small_margin(incumbent, enough)
    minutes = expected_device_minutes(connection, plan)
    run = f"{2 * ADMITTING_BLOCKS} trials" if minutes is None else f"about {minutes:.0f} device minutes"
    most = max((one.blocks for one in own), default=0)
    until = "has a third arm that measures the noise, and wider intervals"
    if not settings.control_every:
        until = "has wider intervals" if most >= MIN_BLOCKS else f"is refused below {MIN_BLOCKS}"
    return (
        f"{most} of {ADMITTING_BLOCKS} A/A blocks are measured for {row.metric} on {node_class}. Until then a proposal "
        f"{until}. To measure them now ({run}): {_measuring(node_class, row.name)}"
    )


def _unprotected(metric: str, workload: Workload) -> str | None:
    """Say that proposals may change the code that reports the deciding number; None if they may not."""
    if workload.evaluate is not None or metric not in workload.metrics or not isinstance(workload.code, SentCode):
        return None
    return (
        f"A proposal may change the code that reports {metric}. A command that no proposal changes can measure it: "
        "name workload.evaluate in the spec that opens a session."
    )


def _check_calibrated(connection: Connection, submission: Submission, name: str) -> None:
    """Raise SpecError if no node has valid A/A blocks for the workload: its proposals would be undecided."""
    spec, plan = submission.spec, submission.plan
    if not spec.verdict.timed:
        return
    own = read_calibrations(connection, workload=workload_of(plan, spec))
    problems = [next(standing_problems(one, time.time()), None) for one in own]
    if None in problems:
        return
    why = "; ".join(dict.fromkeys(filter(None, problems))) or f"there are none on node class {plan.node_class}"
    detail = f"a proposal without valid A/A blocks would be undecided, and would spend its level: {why}"
    hint = f"{_measuring(plan.node_class, name)}: at least {MIN_BLOCKS} A/A blocks"
    raise SpecError([SpecProblem(pointer=pointer("placement", "node_class"), detail=detail, hint=hint)])
