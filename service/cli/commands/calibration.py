"""`ablate calibration`: the noise of devices, from A/A blocks."""

from pathlib import Path
from typing import Annotated

import typer

from ablate.service.cli import tables
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def calibration(
    bundles: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[BUNDLE]...", help="A/A bundles. Default: the calibrations of the service."),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the calibration from the bundles to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the noise of devices, from A/A blocks, and the service's rate of false verdicts."""
    if not bundles:
        with Client() as client:
            answer = client.calibrations()
        print_json(answer) if as_json else out().print(tables.calibrations(answer))
        return
    from ablate.service.cli.calibrations import (  # imports the judge
        calibration_lines,
        read_calibrations,
        write_calibration,
    )

    calibrations = read_calibrations(bundles)
    if out_file is not None:
        write_calibration(calibrations, bundles, out_file)
    if as_json:
        print_json(list(calibrations))
        return
    for one in calibrations:
        for line in calibration_lines(one):
            out().print(line)
