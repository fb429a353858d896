"""The history page: all answers about a gate with a recipe, and the baseline over time."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from ablate.experiments.analysis.noise.history import history_of
from ablate.experiments.analysis.noise.history_series import MIN_POINTS, HistorySeries, LevelChange
from ablate.experiments.design.arms import read_config
from ablate.experiments.design.listings import gates_of
from ablate.experiments.design.metrics import METRICS
from ablate.experiments.design.packages import recipe_names
from ablate.experiments.digest import canonical_json
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.table import Cell, Table, Tone, codes, numbers, row, texts
from ablate.service.http.links import below
from ablate.service.http.problems import check_known
from ablate.service.store.questions.history import baseline_runs, judged_with
from ablate.service.store.tables import rfc3339
from ablate.service.web.ablation_page import changed_gates
from ablate.service.web.answers import read_answer

METRIC = "tokens_per_s"
MOST_ANSWERS = 60
MOST_POINTS = 60


@dataclass(frozen=True, kw_only=True)
class HistoryPage:
    """The whole page."""

    recipe: str
    gate: str
    question: str
    """The gate's question."""
    answers: Table
    baselines: tuple[Table, ...]
    others: tuple[str, ...]
    """Other gates."""


def history_page(connection: Connection, recipe: str, gate: str) -> HistoryPage:
    """Read the history of a gate. Raises Invalid for an unknown recipe or gate."""
    check_known("recipe", recipe, recipe_names())
    gates = gates_of(recipe)
    check_known("gate", gate, list(gates))
    judged = judged_with(connection, recipe, gate, limit=MOST_ANSWERS)
    series = history_of(METRIC, baseline_runs(connection, recipe))
    return HistoryPage(
        recipe=recipe,
        gate=gate,
        question=gates[gate],
        answers=_answers(gate, judged),
        baselines=tuple(map(_baseline, series)),
        others=tuple(name for name in gates if name != gate),
    )


def _answers(gate: str, judged: Sequence[Row[Any]]) -> Table:
    return Table(
        title="Answers",
        columns=texts("value", "answer", "decision", "workload", "ablation", "variant", "node class", "when"),
        rows=tuple(line for one in judged for line in _rows(gate, one)),
        note="The newest first. If a variant changes more gates, they stand beside the value.",
    )


def _rows(gate: str, judged: Row[Any]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each variant that changes the gate."""
    arms = json.loads(judged.plan)["arms"]
    workload, when = read_config(arms[0]["config"]).describe(), wording.moment(rfc3339(judged.created_at))
    lines = {line.arm: line for line in read_answer(judged.verdict).variants}
    for arm, gates in changed_gates(arms).items():
        if gate in gates:
            word = lines[arm].word
            answer = Cell(text=f"{word.text}: {lines[arm].headline}", sign=word.sign, tone=word.tone)
            name = Cell(text=judged.name, link=below(f"/a/{judged.id}"))
            yield row(_value(gate, gates), answer, lines[arm].decision, workload, name, arm, judged.node_class, when)


def _value(gate: str, gates: dict[str, tuple[Any, Any]]) -> Cell:
    before, after = gates[gate]
    others = ", ".join(f"{name} {_shown(new)}" for name, (_, new) in gates.items() if name != gate)
    return Cell(text=f"{_shown(before)} to {_shown(after)}", note=f"with {others}" if others else "")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _baseline(series: HistorySeries) -> Table:
    """Return the table of a baseline over time, newest first, named by the newest ablation that measured it."""
    changes = {change.ablation: change for change in series.changes}
    anchor, unit = series.points[0].value, METRICS[series.metric].unit
    points = series.points[-MOST_POINTS:][::-1]
    rows = (
        row(
            Cell(text=point.name, link=below(f"/a/{point.ablation}")),
            wording.number(point.value, 5),
            wording.percent(100 * (point.value / anchor - 1)),
            f"{point.trials:,}",
            _change(changes.get(point.ablation)),
            point.code[7:15],
            wording.moment(point.at),
        )
        for point in points
    )
    left_out = len(series.points) - len(points)
    return Table(
        title=f"The baseline of {series.points[-1].name} on {series.device}",
        columns=(
            *texts("ablation"),
            *numbers(f"{METRICS[series.metric].label}, {unit}", "to the oldest", "trials"),
            *texts("level"),
            *codes("code"),
            *texts("when"),
        ),
        rows=tuple(rows),
        note=_conclusion(series) + (f" {wording.counted(left_out, 'older point')} left out." if left_out else ""),
    )


def _change(change: LevelChange | None) -> Cell:
    if change is None:
        return Cell(text="")
    tone = {True: Tone.BAD, False: Tone.GOOD, None: Tone.NEUTRAL}[change.worse]
    return Cell(text=wording.percent(change.change_pct), note=change.difference, tone=tone)


def _conclusion(series: HistorySeries) -> str:
    drift = series.since_anchor
    if drift is None:
        points = wording.counted(len(series.points), "point")
        return f"{points}; {MIN_POINTS} are needed to tell a changed level from scatter."
    interval = wording.interval(drift.low_pct, drift.high_pct)
    loss = "; that is a loss" if drift.worse else ""
    return f"Newest against oldest: {wording.percent(drift.change_pct)}, 95 % interval {interval}{loss}."
