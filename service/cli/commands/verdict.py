"""`ablate verdict`: the verdict, with the decision as exit code."""

from typing import Annotated

import typer

from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
from ablate.service.cli import verdict_tables
from ablate.service.cli.arguments import AblationOrBundleArgument
from ablate.service.cli.output import JsonOption, guarded, out, print_json, print_text
from ablate.service.cli.verdicts import CalibrationOption, RequireOption, asked_of, exit_code, verdict_of

app = typer.Typer()


@app.command()
@guarded
def verdict(
    ablation: AblationOrBundleArgument,
    calibration: CalibrationOption = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Also show variants against each other, kernels, reasons and requirements."),
    ] = False,
    require: RequireOption = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the verdict as Markdown, for a pull request.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the verdict. The exit code is the decision: 0 adopt, 1 reject, 2 same, 3 inconclusive, 4 invalid.

    With several variants it is 0 if any of them is to be adopted, otherwise the highest of their codes.

    With --require: 0 if all variants have that decision, else the highest other code, or 6 if the others are adopt.

    5 is an error: there is no decision.
    """
    answer = verdict_of(ablation, calibration)
    if as_json:
        print_json(answer)
    elif markdown:
        print_text(pull_request_markdown(answer, require, asked_of(ablation)) + "\n")
    else:
        console = out()
        console.print(verdict_tables.verdict(answer))
        if explain:
            console.print(*verdict_tables.reasons(answer), sep="\n")
    raise typer.Exit(exit_code(answer.variants, require))
