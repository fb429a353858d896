"""`ablate run`: submit a spec, follow it and show the verdict."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.documents import write_whole
from experiments.reporting.terminal.markdown import pull_request_markdown
from service.cli.arguments import CommitOption, SpecArgument, read_spec
from service.cli.follow import KeyOption, run_spec
from service.cli.output import StreamOption, guarded
from service.cli.verdicts import RequireOption, asked_of, exit_code

app = typer.Typer()


@app.command()
@guarded
def run(
    spec: SpecArgument,
    commit: CommitOption = None,
    require: RequireOption = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Also write the verdict as Markdown, for a pull request."),
    ] = None,
    idempotency_key: KeyOption = None,
    as_json: StreamOption = False,
) -> None:
    """Submit a spec, follow it and show the verdict. Ctrl-C detaches (exit code 130) and cancels nothing.

    The exit code is 0 if there is a verdict. With --require it is that of `ablate verdict --require`.
    """
    ablation_id, verdict = run_spec(read_spec(spec, commit), idempotency_key=idempotency_key, as_json=as_json)
    if markdown is not None:
        write_whole(markdown, pull_request_markdown(verdict, require, asked_of(ablation_id)) + "\n")
    if require is not None:
        raise typer.Exit(exit_code(verdict.variants, require))
