"""The page of an ablation: its state, grid, running trials with curves, failures, answer and report."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from sqlalchemy import Connection, Row

from ablate.experiments.analysis.proposals import NOTE
from ablate.experiments.block_numbers import block_list, block_name
from ablate.experiments.design.load import parse_spec
from ablate.experiments.errors import SpecError
from ablate.experiments.outcomes import BASELINE, VARIANT
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.changes import ChangedArm, changes_in_plan
from ablate.experiments.reporting.step_traces import chrome_trace
from ablate.model.measurements import StepTrace
from ablate.service.errors import NotFound
from ablate.service.http.links import below
from ablate.service.lifecycle import OVER, PROJECTIONS
from ablate.service.principals import Principal
from ablate.service.routes.ablations import public
from ablate.service.schemas.ablations import AblationPublic
from ablate.service.settings import ServiceSettings
from ablate.service.store import outbox
from ablate.service.store.ablations import ablations, results
from ablate.service.store.ablations.ablations import last_event
from ablate.service.store.ablations.sessions import session_of
from ablate.service.store.files import logs
from ablate.service.store.nodes import nodes
from ablate.service.store.questions.circumstances import other_askings
from ablate.service.store.tables import rfc3339
from ablate.service.web.answers import ShortAnswer, read_answer
from ablate.service.web.code_changes import CodeChange, code_changes
from ablate.service.web.grid import Grid, read_grid
from ablate.service.web.live_curves import LivePicture, live_curves

MOST_LIVE = 6
MOST_ASKINGS = 20
MOST_FAILURES = 10
MOST_UNMEASURED = 60
"""Trials without a measurement that are read; those of one arm with one reason become one failure."""
_MAIN = re.compile("<main>(.*)</main>", re.DOTALL)
"""The report's template writes this tag once and escapes it everywhere else."""
_ANSWER_ENDS = "<!-- the answer ends -->"


@dataclass(frozen=True, kw_only=True)
class LiveTrial:
    """A running trial."""

    arm: str
    block: str
    node: str
    steps: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A broken attempt, or trials without a measurement."""

    what: str
    """Arm and block."""
    kind: str
    """Failure class or outcome, in words."""
    reason: str
    log: str
    """The end of its log; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class LivePart:
    """The part of the page that changes while the ablation runs."""

    row: AblationPublic
    over: bool
    seq: int
    """Of the last event that it shows."""
    grid: Grid
    trials: tuple[LiveTrial, ...]
    curves: tuple[LivePicture, ...]
    """None once the ablation is over: the report has the curves then."""
    failures: tuple[Failure, ...]
    broken: int
    """Number of broken attempts, shown or not."""
    unmeasured: int
    """Number of trials without a measurement, shown or not."""


@dataclass(frozen=True, kw_only=True)
class GateAsked:
    """A gate that a variant changes."""

    gate: str
    history: str
    """Address of its history page."""


@dataclass(frozen=True, kw_only=True)
class OtherAsking:
    """Another ablation that asked a question of this one."""

    ablation: str
    name: str
    answer: str
    """Its answer, or its state."""
    when: str
    """RFC 3339: when it asked."""
    is_later: bool


@dataclass(frozen=True, kw_only=True)
class AblationPage:
    """The whole page."""

    live: LivePart
    changed: tuple[ChangedArm, ...]
    """The variants with their changes."""
    note: str
    """Its author's words about the change."""
    code: tuple[CodeChange, ...]
    """Changed lines of sent code."""
    gates: tuple[GateAsked, ...]
    askings: tuple[OtherAsking, ...]
    """Other askings of the same questions, oldest first."""
    answer: ShortAnswer | None
    report: Markup | None
    """The answer in the report; None before it is written."""
    evidence: Markup | None
    """The rest of the report's main part."""
    traced: tuple[str, ...]
    """Arms with a profiled step over time."""
    session: str | None
    """The session of which the ablation is a proposal."""
    mlflow_problem: str
    """Why MLflow lacks the newest state; empty unless the last try failed."""


def ablation_page(
    connection: Connection, settings: ServiceSettings, ablation_id: str, principal: Principal
) -> AblationPage:
    """Read an ablation's page. Raises NotFound."""
    plan = _plan(connection, ablation_id)
    arms = json.loads(plan)["arms"]
    report, evidence = _report_of(connection, ablation_id)
    live = _live_part(connection, settings, ablation_id, arms)
    return AblationPage(
        live=live,
        changed=tuple(changes_in_plan(plan).values()),
        note=live.row.labels.get(NOTE, ""),
        code=code_changes(connection, arms, principal),
        gates=_gates_asked(connection, ablation_id, arms),
        askings=_other_askings(connection, ablation_id),
        answer=_answer_of(connection, ablation_id),
        report=report,
        evidence=evidence,
        traced=_traced(connection, ablation_id, arms),
        session=session_of(connection, ablation_id),
        mlflow_problem=outbox.failing(connection, PROJECTIONS, key=ablation_id).error,
    )


def live_part(connection: Connection, settings: ServiceSettings, ablation_id: str) -> LivePart:
    """Read the part that changes while an ablation runs. Raises NotFound."""
    return _live_part(connection, settings, ablation_id, json.loads(_plan(connection, ablation_id))["arms"])


def _plan(connection: Connection, ablation_id: str) -> str:
    return str(ablations.get_document(connection, ablation_id, "plan").document)


def _live_part(
    connection: Connection, settings: ServiceSettings, ablation_id: str, arms: list[dict[str, Any]]
) -> LivePart:
    seq = last_event(connection, ablation_id)  # read first: the stream sends later events
    row = public(connection, [ablations.get_ablation(connection, ablation_id)], settings)[0]
    broken = ablations.newest_breaks(connection, ablation_id, limit=MOST_FAILURES)
    unmeasured = ablations.newest_unmeasured(connection, ablation_id, limit=MOST_UNMEASURED)
    has_more = len(unmeasured) == MOST_UNMEASURED
    names = [arm["name"] for arm in arms]
    num_unmeasured = ablations.count_unmeasured(connection, ablation_id) if has_more else len(unmeasured)
    return LivePart(
        row=row,
        over=row.state in OVER,
        seq=seq,
        grid=read_grid(connection, row, names),
        trials=tuple(map(_live, nodes.running_trials(connection, ablation_id, limit=MOST_LIVE))),
        curves=() if row.state in OVER else live_curves(connection, ablation_id, names),
        failures=(*(_broken(connection, one) for one in broken), *_unmeasured(connection, unmeasured)),
        broken=ablations.count_breaks(connection, ablation_id),
        unmeasured=num_unmeasured,
    )


def _live(row: Row[Any]) -> LiveTrial:
    return LiveTrial(arm=row.arm, block=block_name(row.block_index), node=row.node or "", steps=_steps(row))


def _steps(row: Row[Any]) -> str:
    if row.steps_done is None:
        return "runs"
    parts = [f"step {wording.share(row.steps_done, row.steps_total)}"]
    if row.tokens_per_s is not None:
        parts.append(f"{wording.number(row.tokens_per_s)} tokens/s")
    if row.loss is not None:
        parts.append(f"loss {wording.fixed(row.loss, 3)}")
    return ", ".join(parts)


def _broken(connection: Connection, row: Row[Any]) -> Failure:
    where = f"{block_name(row.block_index)}, attempt {row.number} on {row.node}"
    return Failure(
        what=f"{row.arm}, {where}" if row.arm else where,
        kind=wording.failure(row.failure_class),
        reason=row.message,
        log=logs.tail_of_break(connection, row),
    )


def _unmeasured(connection: Connection, rows: Sequence[Row[Any]]) -> Iterator[Failure]:
    """Yield one failure for each arm and reason, with the log of the newest trial."""
    groups: dict[tuple[str, str, str], list[Row[Any]]] = {}
    for row in rows:
        reason = json.loads(row.payload).get("message") or "its receipt gives no reason"
        groups.setdefault((row.arm, row.outcome, reason), []).append(row)
    for (arm, outcome, reason), own in list(groups.items())[:MOST_FAILURES]:
        where = block_list(sorted(row.block_index for row in own))
        blocks = f"block {where}{_attempt(own[0].attempt_number)}" if len(own) == 1 else f"blocks {where}"
        log = logs.tail(connection, own[0].id, own[0].attempt_id)
        yield Failure(what=f"{arm}, {blocks}", kind=wording.failure(outcome), reason=reason, log=log)


def _attempt(number: int) -> str:
    """Name the attempt, unless it was the first."""
    return f", attempt {number}" if number > 1 else ""


def _gates_asked(connection: Connection, ablation_id: str, arms: list[dict[str, Any]]) -> tuple[GateAsked, ...]:
    """Return every gate that a variant changes; none if this version cannot read the spec."""
    body = results.read_spec(connection, ablation_id)
    try:
        recipe = parse_spec(body.content, body.content_type).workload.recipe
    except SpecError:
        return ()
    if recipe is None:  # settings of a command have no history of their own
        return ()
    names = sorted({gate for gates in changed_gates(arms).values() for gate in gates})
    return tuple(GateAsked(gate=gate, history=below(f"/history/{recipe}/{gate}")) for gate in names)


def _other_askings(connection: Connection, ablation_id: str) -> tuple[OtherAsking, ...]:
    """Return the newest other askings of the questions of an ablation."""
    return tuple(
        OtherAsking(
            ablation=other.id,
            name=other.name,
            answer=other.answer or str(other.state),
            when=rfc3339(other.moment),
            is_later=other.is_later,
        )
        for other in other_askings(connection, ablation_id)[-MOST_ASKINGS:]
    )


def changed_gates(arms: list[dict[str, Any]]) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return by variant its changed gates, each with the baseline's value and its own."""
    base = next(arm["gates"] for arm in arms if arm["role"] == BASELINE)
    return {
        arm["name"]: {gate: (base[gate], value) for gate, value in arm["gates"].items() if value != base[gate]}
        for arm in arms
        if arm["role"] == VARIANT
    }


def _traced(connection: Connection, ablation_id: str, arms: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the arms with a profiled step over time, in the order of the plan."""
    traced = {row.arm for row in results.traced_trials(connection, ablation_id)}
    return tuple(arm["name"] for arm in arms if arm["name"] in traced)


def trace_of(connection: Connection, ablation_id: str, arm: str) -> str:
    """Return an arm's profiled step over time in Chrome's trace format. Raises NotFound."""
    row = ablations.get_ablation(connection, ablation_id)
    found = {one.arm: one.trial_id for one in results.traced_trials(connection, ablation_id)}
    if arm not in found:
        known = ", ".join(found) or "none; workload.profile asks for them"
        raise NotFound(f"ablation {ablation_id} has no trace of arm {arm!r}; arms with one: {known}")
    trace = json.loads(results.read_payload(connection, found[arm]))["step_trace"]
    return chrome_trace(f"{row.name}: {arm}", StepTrace.model_validate(trace))


def _answer_of(connection: Connection, ablation_id: str) -> ShortAnswer | None:
    """Return the answer of an ablation; None before its verdict."""
    document = ablations.get_document(connection, ablation_id, "verdict").document
    return None if document is None else read_answer(document)


def _report_of(connection: Connection, ablation_id: str) -> tuple[Markup | None, Markup | None]:
    """Return the answer in the stored report, and the rest of its main part; None before it is written."""
    document = ablations.get_document(connection, ablation_id, "report_html").document
    match = None if document is None else _MAIN.search(document)
    if match is None:
        return None, None
    answer, _end, rest = match[1].partition(_ANSWER_ENDS)
    return Markup(answer), Markup(rest)  # noqa: S704  # rendered and escaped by our own template
