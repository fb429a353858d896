"""What the page of an ablation shows: where it stands, its grid, what runs, what failed, and its report."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from sqlalchemy import Connection, Row

from experiments.block_numbers import block_list, block_name
from experiments.design.load import parse_spec
from experiments.errors import SpecError
from experiments.outcomes import BASELINE, VARIANT
from experiments.reporting import wording
from service.lifecycle import OVER
from service.routes.ablations import public
from service.schemas.ablations import AblationPublic
from service.settings import ServiceSettings
from service.store.ablations import ablations, failures, results
from service.store.ablations.changes import last_event
from service.store.nodes import nodes
from service.web import curve
from service.web.answers import ShortAnswer, read_answer
from service.web.curve import Curve
from service.web.grid import Grid, read_grid

MOST_LIVE = 6
MOST_FAILURES = 10
MOST_UNMEASURED = 60
"""Trials without a measurement that are looked at; those of one arm with one reason are told together."""
_MAIN = re.compile("<main>(.*)</main>", re.DOTALL)
"""The report's own template writes it once, and nothing that it escapes can."""


@dataclass(frozen=True, kw_only=True)
class LiveTrial:
    """A trial that runs."""

    arm: str
    block: str
    node: str
    steps: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that did not measure."""

    what: str
    """Arm and block."""
    kind: str
    """Failure class or outcome."""
    reason: str
    log: str
    """The end of its log; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class LivePart:
    """What changes while it runs."""

    row: AblationPublic
    over: bool
    seq: int
    """Of the last event that it holds."""
    grid: Grid
    trials: tuple[LiveTrial, ...]
    failures: tuple[Failure, ...]
    failed: int
    """Attempts that broke and trials that did not measure, shown or not."""


@dataclass(frozen=True, kw_only=True)
class GateAsked:
    """A gate that a variant changes."""

    gate: str
    history: str
    """Address of what is known of it."""


@dataclass(frozen=True, kw_only=True)
class AblationPage:
    """All of an ablation's page."""

    live: LivePart
    gates: tuple[GateAsked, ...]
    answer: ShortAnswer | None
    report: Markup | None
    """The main part of its report; None before there is one."""


def ablation_page(connection: Connection, settings: ServiceSettings, ablation_id: str) -> AblationPage:
    """Read an ablation's page. Raises NotFound."""
    return AblationPage(
        live=live_part(connection, settings, ablation_id),
        gates=_gates_asked(connection, ablation_id),
        answer=_answer_of(connection, ablation_id),
        report=_report_of(connection, ablation_id),
    )


def live_part(connection: Connection, settings: ServiceSettings, ablation_id: str) -> LivePart:
    """Read what changes while an ablation runs. Raises NotFound."""
    seq = last_event(connection, ablation_id)  # before the rest: what comes later is told by the stream
    row = public(connection, [ablations.get_ablation(connection, ablation_id)], settings)[0]
    arms = [str(arm["name"]) for arm in _plan(connection, ablation_id)["arms"]]
    broken = failures.broken_attempts(connection, ablation_id, limit=MOST_FAILURES)
    unmeasured = failures.unmeasured_trials(connection, ablation_id, limit=MOST_UNMEASURED)
    found = (*(_broken(connection, one) for one in broken), *_unmeasured(connection, unmeasured))
    runs = nodes.running_trials(connection, ablation_id, limit=MOST_LIVE)
    return LivePart(
        row=row,
        over=row.state in OVER,
        seq=seq,
        grid=read_grid(connection, row, arms),
        trials=tuple(_live(connection, one) for one in runs),
        failures=found,
        failed=failures.count(connection, ablation_id),
    )


def _plan(connection: Connection, ablation_id: str) -> dict[str, Any]:
    return dict(json.loads(ablations.get_document(connection, ablation_id, "plan").document))


def _live(connection: Connection, row: Row[Any]) -> LiveTrial:
    told = nodes.heartbeats(connection, row.id)
    steps = [int(one["steps_done"]) for one in told]
    drawn = (
        curve.draw("loss", steps, [one["loss"] for one in told]),
        curve.draw("tokens/s", steps, [one["tokens_per_s"] for one in told]),
    )
    return LiveTrial(
        arm=row.arm,
        block=block_name(row.block_index),
        node=row.node or "",
        steps=_steps(row),
        curves=tuple(one for one in drawn if one is not None),
    )


def _steps(row: Row[Any]) -> str:
    if row.steps_done is None:
        return "starting"
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
        kind=row.failure_class,
        reason=row.message,
        log=failures.tail_of_attempt(connection, row),
    )


def _unmeasured(connection: Connection, rows: Sequence[Row[Any]]) -> Iterator[Failure]:
    """Yield what did not measure, each reason of an arm once, with the log of the newest trial."""
    groups: dict[tuple[str, str, str], list[Row[Any]]] = {}
    for row in rows:
        reason = json.loads(row.payload).get("message") or "its receipt gives no reason"
        groups.setdefault((row.arm, row.outcome, reason), []).append(row)
    for (arm, outcome, reason), own in list(groups.items())[:MOST_FAILURES]:
        where = block_list(sorted(row.block_index for row in own))
        blocks = f"block {where}{_attempt(own[0].attempt_number)}" if len(own) == 1 else f"blocks {where}"
        log = failures.tail(connection, own[0].id, own[0].attempt_id)
        yield Failure(what=f"{arm}, {blocks}", kind=outcome, reason=reason, log=log)


def _attempt(number: int) -> str:
    """Say which attempt it was, of a block that was not run once."""
    return f", attempt {number}" if number > 1 else ""


def _gates_asked(connection: Connection, ablation_id: str) -> tuple[GateAsked, ...]:
    """Return every gate that a variant changes, with where its history is; none for specs of other versions."""
    body = results.read_spec(connection, ablation_id)
    try:
        recipe = parse_spec(body.content, body.content_type).workload.recipe
    except SpecError:
        return ()
    changed = changed_gates(_plan(connection, ablation_id)["arms"])
    names = sorted({gate for gates in changed.values() for gate in gates})
    return tuple(GateAsked(gate=gate, history=f"/history/{recipe}/{gate}") for gate in names)


def changed_gates(arms: list[dict[str, Any]]) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Return by variant the gates that it changes, with the baseline's value and its own."""
    base = next(arm["gates"] for arm in arms if arm["role"] == BASELINE)
    return {
        arm["name"]: {gate: (base[gate], value) for gate, value in arm["gates"].items() if value != base[gate]}
        for arm in arms
        if arm["role"] == VARIANT
    }


def _answer_of(connection: Connection, ablation_id: str) -> ShortAnswer | None:
    """Return the answer of an ablation; None before there is one."""
    document = ablations.get_document(connection, ablation_id, "verdict").document
    return None if document is None else read_answer(document)


def _report_of(connection: Connection, ablation_id: str) -> Markup | None:
    """Return the main part of the stored report; None before there is one."""
    document = ablations.get_document(connection, ablation_id, "report_html").document
    found = None if document is None else _MAIN.search(document)
    return None if found is None else Markup(found[1])  # noqa: S704  # rendered and escaped by our own template
