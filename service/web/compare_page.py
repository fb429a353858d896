"""Two ablations side by side: their answers, the conditions of both, and the settings in which they differ."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from ablate.experiments.analysis.verdicts import Verdict
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Table, row, texts
from ablate.experiments.reporting.verdict_layout import VariantLayout, VerdictLayout, is_exact, lay_out, over_seeds
from ablate.service.http.links import below
from ablate.service.lifecycle import OVER
from ablate.service.routes.ablations import public
from ablate.service.schemas.ablations import AblationPublic
from ablate.service.settings import ServiceSettings
from ablate.service.store.ablations import ablations, names
from ablate.service.store.ablations.ablations import Wanted

MOST_CHOICES = 60
MOST_SETTINGS = 40
_NOTE = (
    "Each effect is against the baseline of its own ablation. The two ran at different times, so their absolute rates "
    "also differ by the state of the machine. Nothing here is a test of one against the other."
)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two ablations."""

    row: AblationPublic
    plan: Mapping[str, Any]
    verdict: Verdict | None
    layout: VerdictLayout | None


@dataclass(frozen=True, kw_only=True)
class ComparePage:
    """The whole page."""

    choices: tuple[tuple[str, str], ...]
    """(id, words) of the newest finished ablations."""
    chosen: tuple[str, str]
    """Ids; empty where none was chosen."""
    leads: tuple[tuple[str, str, str], ...]
    """(letter and name, address, answer in one sentence) of both; none until both are chosen."""
    tables: tuple[Table, ...]


def compare_page(connection: Connection, settings: ServiceSettings, first: str, second: str) -> ComparePage:
    """Read the page; `first` and `second` are what people call the ablations, or empty. Raises NotFound, Conflict."""
    ids = [names.find_ablation(connection, called) if called else "" for called in (first, second)]
    newest = ablations.list_ablations(connection, Wanted(states=tuple(OVER)), before=None, limit=MOST_CHOICES)
    choices = {one.id: f"{one.name}, {wording.moment(one.created_at)}" for one in public(connection, newest, settings)}
    sides = [_side(connection, settings, one) for one in ids if one]
    choices |= {side.row.id: f"{side.row.name}, {wording.moment(side.row.created_at)}" for side in sides}
    leads: tuple[tuple[str, str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    if len(sides) == 2:
        leads = tuple(
            (
                f"{letter}: {side.row.name}",
                below(f"/a/{side.row.id}"),
                side.layout.lead if side.layout else side.row.state,
            )
            for letter, side in zip("AB", sides, strict=True)
        )
        tables = (_answers(*sides), _conditions(*sides), _settings(*sides))
    return ComparePage(choices=tuple(choices.items()), chosen=(ids[0], ids[1]), leads=leads, tables=tables)


def _side(connection: Connection, settings: ServiceSettings, ablation_id: str) -> Side:
    document = ablations.get_document(connection, ablation_id, "verdict").document
    verdict = None if document is None else Verdict.model_validate_json(document)
    return Side(
        row=public(connection, [ablations.get_ablation(connection, ablation_id)], settings)[0],
        plan=json.loads(ablations.get_document(connection, ablation_id, "plan").document),
        verdict=verdict,
        layout=None if verdict is None else lay_out(verdict),
    )


def _answers(one: Side, other: Side) -> Table:
    answers = [{v.arm: v for v in side.layout.variants} if side.layout else {} for side in (one, other)]
    arms = dict.fromkeys(arm for own in answers for arm in own)
    headings = [
        f"{letter}: {name}" for letter in "AB" for name in ("verdict", "effect", "interval or repeats", "decision")
    ]
    return Table(
        title="Answers",
        columns=texts("variant", *headings),
        rows=tuple(row(arm, *(cell for own in answers for cell in _cells(own.get(arm)))) for arm in arms),
        note=_NOTE,
    )


def _cells(variant: VariantLayout | None) -> tuple[Cell, ...]:
    if variant is None:
        return (Cell(text=wording.NOTHING),) * 4
    return variant.word, variant.effect, variant.interval, variant.decision


def _conditions(one: Side, other: Side) -> Table:
    facts = [dict(_facts(side)) for side in (one, other)]
    rows = [(name, *(own.get(name, wording.NOTHING) for own in facts)) for name in {**facts[0], **facts[1]}]
    alike = "; ".join(f"{name}: {a}" for name, a, b in rows if a == b)
    return Table(
        title="Conditions that differ",
        columns=texts("condition", "A", "B"),
        rows=tuple(row(name, a, b) for name, a, b in rows if a != b),
        note=f"Alike in both: {alike}." if alike else "",
    )


def _facts(side: Side) -> Iterator[tuple[str, str]]:
    yield "question", side.row.question
    yield "node class", side.row.node_class
    yield "state", side.row.state
    yield "blocks", wording.share(side.row.blocks.done, side.row.blocks.planned)
    if side.verdict is None or side.layout is None:
        return
    rule = side.layout.rule
    yield "deciding metric", wording.metric(rule.metric)
    yield "margin", wording.plain_percent(rule.margin_pct)
    yield "adopt from", wording.percent(rule.adopt_from_pct)
    yield "asking of its question", f"{side.verdict.circumstances.family.number}"
    needless = is_exact(side.verdict) or over_seeds(side.verdict)
    yield "calibrated", "not needed" if needless else "yes" if side.verdict.calibrated else "no"
    baseline = side.verdict.arms[side.verdict.baseline]
    yield "baseline's throughput", wording.rate(baseline) or wording.NOTHING
    yield "baseline's peak memory", wording.gib(baseline.peak_allocated_bytes)
    yield "nodes", ", ".join(dict.fromkeys(signer.name for signer in side.verdict.circumstances.signers))


def _settings(one: Side, other: Side) -> Table:
    """Return the values of the two baselines that differ, gates included.

    A value that one lacks is no difference: plans of earlier code have fewer, with the same meaning.
    """
    mine, theirs = (_flat(side.plan["arms"][0]["config"]) for side in (one, other))
    differ = [name for name in sorted(mine.keys() & theirs.keys()) if mine[name] != theirs[name]]
    left, alone = len(differ) - MOST_SETTINGS, len(mine.keys() ^ theirs.keys())
    notes = [] if differ else ["The baselines have equal settings."]
    notes += [f"{left:,} more are not shown."] if left > 0 else []
    notes += [f"{wording.counted(alone, 'setting')} of one of the two only: another workload, or earlier code."] * bool(
        alone
    )
    return Table(
        title="Settings in which the baselines differ",
        columns=texts("setting", "A", "B"),
        rows=tuple(row(name, mine[name], theirs[name]) for name in differ[:MOST_SETTINGS]),
        note=" ".join(notes),
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a configuration as text by their paths."""
    values: dict[str, str] = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        values |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: json.dumps(value)}
    return values
