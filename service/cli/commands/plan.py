"""`ablate plan`: say what a spec would run."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli import show
from service.cli.output import JsonOption, guarded, out, print_json
from service.cli.spec_argument import SpecArgument, read_spec
from service.cli.verdict_source import only_offline
from service.client.api import Client

app = typer.Typer()

NoiseOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="With --out, where the spec says `blocks: auto`: the noise that the number of blocks follows from. "
        "An A/A bundle, or what `ablate calibration` wrote.",
    ),
]


@app.command()
@guarded
def plan(
    spec: SpecArgument,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write a plan file for `ablate exec` instead; needs no service.")
    ] = None,
    calibration: NoiseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a spec would run, on which nodes and what it could detect. Nothing is stored."""
    if out_file is not None:
        from service.cli import calibration_files, offline_work

        known = calibration_files.read_calibrations(calibration)
        offline_work.write_plan(read_spec(spec), out_file, known=known, as_json=as_json)
        return
    only_offline(calibration)
    with Client() as client:
        answer = client.ablations.plan(read_spec(spec))
    print_json(answer) if as_json else out().print(show.plan(answer))
