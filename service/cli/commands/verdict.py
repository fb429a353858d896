"""`ablate verdict`: the answer, and an exit code that says the decision."""

from typing import Annotated

import typer

from experiments.reporting.terminal.pull_request import pull_request_markdown
from service.cli import show_verdict
from service.cli.decisions import RequireOption, exit_code
from service.cli.names import JudgedArgument
from service.cli.output import JsonOption, guarded, out, print_json, print_text
from service.cli.verdict_source import CalibrationOption, verdict_of

app = typer.Typer()


@app.command()
@guarded
def verdict(
    ablation: JudgedArgument,
    calibration: CalibrationOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, with every requirement of the rule.")] = False,
    require: RequireOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the verdict. The exit code is the decision: 0 adopt, 1 reject, 2 same, 3 inconclusive, 4 invalid.

    With several variants it is 0 when one of them is to be adopted, otherwise the highest of their codes.

    With --require it is 0 when every variant has that decision, otherwise the highest code of those that have another.

    6: --require was not met, and all that have another decision are to be adopted, whose own code is 0.

    5: an error; there is no decision.
    """
    found = verdict_of(ablation, calibration)
    if as_json:
        print_json(found)
    elif markdown:
        print_text(pull_request_markdown(found, require) + "\n")
    else:
        console = out()
        console.print(show_verdict.verdict(found))
        for line in show_verdict.explanation(found) if explain else ():
            console.print(line)
    raise typer.Exit(exit_code(found.variants, require))
