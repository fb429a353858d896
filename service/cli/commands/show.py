"""`ablate show`: one ablation and its trials."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from ablate.experiments.block_numbers import block_index, block_number
from ablate.service.cli import completion, tables
from ablate.service.cli.arguments import ABLATION_NAMES, ablation_id, divided_place, trials_at
from ablate.service.cli.output import JsonOption, guarded, out, print_json_list
from ablate.service.client.api import Client

if TYPE_CHECKING:
    from rich.console import RenderableType

app = typer.Typer()

_SHOWN = 200
"""Trials in a table."""


@app.command("show")
@guarded
def show_(
    ablation: Annotated[
        str,
        typer.Argument(
            metavar="ABLATION[/BLOCK[/ARM]]",
            help=f"The ablation: {ABLATION_NAMES}. With a block, or a block and an arm, only their trials.",
            autocompletion=completion.places,
        ),
    ],
    from_block: Annotated[int | None, typer.Option(min=1, help="Begin with the trials of this block.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Show at most this many trials. Default: 200, with --json all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one ablation, its trials, and the kernels of profiled steps."""
    called, place = divided_place(ablation)
    if place and from_block is not None:
        raise typer.BadParameter(f"--from-block begins in an ablation, and {ablation!r} names its block already")
    with Client() as client:
        name = ablation_id(client, called)
        row, trials = client.ablations.get(name), client.ablations.trials(name, from_block=block_index(from_block or 1))
        if place:
            trials = iter(trials_at(client, name, place))
        if as_json:
            print_json_list("trials", islice(trials, limit), ablation=row)
            return
        shown = list(islice(trials, limit or _SHOWN))
        following = next(trials, None)
        kernels = [] if row.answer is None else _kernels(client, name)
    rest = None if following is None else block_number(following.block_index)
    out().print(tables.ablation(row, shown, rest=rest), *kernels, sep="\n")


def _kernels(client: Client, name: str) -> "list[RenderableType]":
    """Return the tables of kernels in the verdict."""
    from ablate.service.cli import (
        verdict_tables,  # imports the statistics, which other uses of this command do not need
    )

    return verdict_tables.kernels(client.ablations.verdict(name))
