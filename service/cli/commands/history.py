"""`ablate history`: the baseline of a recipe over time."""

from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.analysis.noise.history_series import MIN_POINTS, HistorySeries, LevelChange
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, ids, names, numbers, texts
from ablate.service.cli import completion
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def history(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe, for example hybrid-tiny.", autocompletion=completion.recipes),
    ],
    metric: Annotated[
        str, typer.Option(help="A metric of receipts.", autocompletion=completion.metrics)
    ] = "tokens_per_s",
    node_class: Annotated[
        str | None, typer.Option(help="Only this node class.", autocompletion=completion.node_classes)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a recipe's baseline over time: values, changes of level, and the sum of small losses."""
    with Client() as client:
        every = client.history(recipe, metric=metric, node_class=node_class)
    if as_json:
        print_json(every)
        return
    for series in every:
        _print(series)
    if not every:
        out().print(f"no finished ablation of {escape(recipe)} has a baseline with this metric")


def _print(series: HistorySeries) -> None:
    unit = wording.unit(series.metric)
    title = (
        f"{wording.metric(series.metric)} of the baseline of {_names(series)} on {series.node_class}, {series.device}"
    )
    table = TerminalTable(
        *names("when", "ablation"),
        *ids("id"),
        *numbers(f"value ({unit})", "vs. oldest", "trials"),
        *names("code"),
        *texts("level"),
        title=escape(title),
        leaving=("code", "trials", "id"),
    )
    changes = {change.ablation: change for change in series.changes}
    anchor = series.points[0].value
    codes = list(dict.fromkeys(point.code for point in series.points))
    versions = {code: f"version {number}" for number, code in enumerate(codes, 1)}
    for point in series.points:
        change = changes.get(point.ablation)
        table.add_row(
            wording.moment(point.at),
            escape(point.name),
            point.ablation,
            wording.number(point.value, 5),
            wording.percent(100 * (point.value / anchor - 1)),
            f"{point.trials:,}",
            versions[point.code],
            "" if change is None else _change(change),
        )
    out().print(table)
    out().print(f"  {_conclusion(series)}")


def _names(series: HistorySeries) -> str:
    """Return the name of the newest ablation of a series, and how many other names it has."""
    newest, others = series.points[-1].name, len({point.name for point in series.points}) - 1
    return f"{newest} and {wording.counted(others, 'other name')}" if others else newest


def _change(change: LevelChange) -> str:
    colour = {True: "red", False: "green", None: "yellow"}[change.worse]
    return f"[{colour}]{wording.percent(change.change_pct)}[/], {change.difference}"


def _conclusion(series: HistorySeries) -> str:
    drift = series.since_anchor
    if drift is None:
        points = wording.counted(len(series.points), "point")
        return f"{points}; {MIN_POINTS} are needed to tell a change of level from scatter"
    interval = wording.interval(drift.low_pct, drift.high_pct)
    loss = "; [red]that is a loss[/]" if drift.worse else ""
    return f"newest against oldest: {wording.percent(drift.change_pct)}, 95 % interval {interval}{loss}"
