"""`ablate report`: save the report."""

from pathlib import Path
from typing import Annotated

import typer

from ablate.service.cli.arguments import AblationOrBundleArgument
from ablate.service.cli.output import JsonOption, guarded, out, print_json, print_text
from ablate.service.cli.verdicts import CalibrationOption, report_of
from ablate.service.stack.layout import home_files

app = typer.Typer()


@app.command()
@guarded
def report(
    ablation: AblationOrBundleArgument,
    output: Annotated[
        str | None, typer.Option("--output", "--out", "-o", help="The file, or - for standard output.")
    ] = None,
    calibration: CalibrationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Save the report as one self-contained HTML page. Default: $ABLATE_HOME/reports/<id>.html."""
    name, page = report_of(ablation, calibration)
    if output == "-":
        print_text(page + "\n")
        return
    path = home_files().save_report(name, page, Path(output) if output else None)
    print_json({"path": str(path)}) if as_json else out().print(str(path))
