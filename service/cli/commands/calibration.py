"""`ablate calibration`: what A/A blocks say about the noise of devices."""

from pathlib import Path
from typing import Annotated

import typer

from service.cli import show
from service.cli.output import JsonOption, guarded, out, print_json
from service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def calibration(
    bundles: Annotated[
        list[Path] | None, typer.Argument(metavar="[BUNDLE]...", help="A/A bundles, read here. Default: the service.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the one calibration that they give.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what A/A blocks say about the noise of devices, and the service's own rate of false words."""
    if not bundles:
        with Client() as client:
            answer = client.calibrations()
        print_json(answer) if as_json else out().print(show.calibrations(answer))
        return
    from service.cli import calibration_files  # with the judge of bundles

    found = calibration_files.read_calibrations(bundles)
    if out_file is not None:
        calibration_files.write(found, out_file)
    if as_json:
        print_json(list(found))
        return
    for one in found:
        for line in calibration_files.lines(one):
            out().print(line)
