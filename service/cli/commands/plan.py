"""`ablate plan`: show what a spec would run."""

from pathlib import Path
from typing import Annotated

import typer

from ablate.service.cli import tables
from ablate.service.cli.arguments import CommitOption, SeedsOption, SpecArgument, read_spec
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.cli.verdicts import reject_calibrations
from ablate.service.client.api import Client

app = typer.Typer()

NoiseOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="With --out and `blocks: auto` in the spec: the noise that decides the number of blocks. An A/A bundle.",
    ),
]


@app.command()
@guarded
def plan(
    spec: SpecArgument,
    commit: CommitOption = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write a plan for `ablate offline exec` and stop: JSON, or a .tar file with code. A service, if any, "
            "counts its questions and draws its seeds.",
        ),
    ] = None,
    unregistered: Annotated[
        bool, typer.Option("--unregistered", help="With --out: ask no service. Every page of the result says so.")
    ] = False,
    calibration: NoiseOption = None,
    seeds: SeedsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the trials of a spec, the nodes for them, and the effect that they can detect. Stores nothing."""
    if out_file is not None:
        from ablate.service.cli import offline
        from ablate.service.cli.calibrations import read_calibrations

        calibrations = read_calibrations(calibration)
        body = read_spec(spec, commit, seeds)
        file = offline.write_plan(body, out_file, calibrations=calibrations, unregistered=unregistered)
        offline.print_plan(file, out_file, as_json=as_json)
        return
    reject_calibrations(calibration)
    with Client() as client:
        answer = client.ablations.plan(read_spec(spec, commit, seeds))
    print_json(answer) if as_json else out().print(tables.plan(answer))
