"""`ablate run`: submit a spec, watch it and show the verdict."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.reporting.terminal.pull_request import pull_request_markdown
from service.cli.decisions import RequireOption, exit_code
from service.cli.output import StreamOption, guarded
from service.cli.spec_argument import SpecArgument, read_spec
from service.cli.submitting import KeyOption, run_spec

app = typer.Typer()


@app.command()
@guarded
def run(
    spec: SpecArgument,
    require: RequireOption = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the verdict for a pull request, too.")
    ] = None,
    idempotency_key: KeyOption = None,
    as_json: StreamOption = False,
) -> None:
    """Submit a spec, watch it and show the verdict. Ctrl-C detaches (exit code 130) and cancels nothing.

    Exit code: 0 when there is a verdict; with --require as `ablate verdict` with it.
    """
    verdict = run_spec(read_spec(spec), idempotency_key=idempotency_key, as_json=as_json)
    if markdown is not None:
        markdown.write_text(pull_request_markdown(verdict, require) + "\n", encoding="utf-8")
    if require is not None:
        raise typer.Exit(exit_code(verdict.variants, require))
