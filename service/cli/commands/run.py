"""`ablate run`: submit a spec, follow it and show the verdict."""

from pathlib import Path
from typing import Annotated

import typer

from ablate.experiments.documents import write_whole
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.reporting.terminal.markdown import pull_request_markdown
from ablate.service.cli import completion
from ablate.service.cli.arguments import CommitOption, SeedsOption, read_spec
from ablate.service.cli.follow import KeyOption, print_accepted, run_spec
from ablate.service.cli.output import StreamOption, guarded, out, print_json
from ablate.service.cli.verdicts import RequireOption, asked_of, exit_code
from ablate.service.client.api import Client
from ablate.service.schemas.submissions import SpecBody

app = typer.Typer()


@app.command()
@guarded
def run(  # noqa: PLR0913, PLR0917 - a command's options are its function's arguments
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC]",
            help="A spec file (YAML, JSON), - for standard input, or a catalog name.",
            autocompletion=completion.catalog,
        ),
    ] = None,
    continued: Annotated[
        str | None,
        typer.Option(
            "--continue",
            metavar="ABLATION",
            help="Instead of SPEC: ask the undecided questions of this ablation again, after showing what that costs.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --continue: spend another asking of the question.")] = False,
    by_work: Annotated[
        bool,
        typer.Option("--processor-time", help="With --continue: processor time decides, a question of its own."),
    ] = False,
    commit: CommitOption = None,
    seeds: SeedsOption = None,
    require: RequireOption = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", help="Also write the verdict as Markdown, for a pull request."),
    ] = None,
    idempotency_key: KeyOption = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the spec and return at once.")] = False,
    as_json: StreamOption = False,
) -> None:
    """Submit a spec, follow it and show the verdict. Ctrl-C detaches (exit code 130) and cancels nothing.

    The exit code is 0 if there is a verdict. With --require it is that of `ablate verdict --require`. With --detach
    --json prints one document.
    """
    if detach and not (require is None and markdown is None):
        detail = "--detach waits for no verdict, so it takes neither --require nor --markdown"
        raise SpecError([SpecProblem(pointer="--detach", detail=detail, hint="ablate verdict latest --require WORD")])
    body = _asked(spec, continued, commit, seeds, yes=yes, by_work=by_work)
    if detach:
        with Client() as client:
            answer = client.ablations.submit(body, idempotency_key=idempotency_key)
        print_json(answer) if as_json else print_accepted(out(), answer)
        return
    ablation_id, verdict = run_spec(body, idempotency_key=idempotency_key, as_json=as_json)
    if markdown is not None:
        write_whole(markdown, pull_request_markdown(verdict, require, asked_of(ablation_id)) + "\n")
    if require is not None:
        raise typer.Exit(exit_code(verdict.variants, require))


def _asked(
    spec: str | None,
    continued: str | None,
    commit: list[str] | None,
    seeds: str | None,
    *,
    yes: bool,
    by_work: bool,
) -> SpecBody:
    """Return the spec to submit. Raises SpecError unless exactly one of both names it."""
    if spec is not None and continued is None and not yes and not by_work:
        return read_spec(spec, commit, seeds)
    if spec is not None or continued is None or commit or seeds:
        detail = "give a SPEC, or --continue ABLATION alone or with --yes or --processor-time"
        raise SpecError([SpecProblem(pointer="--continue", detail=detail, hint="ablate run --help")])
    from ablate.service.cli.continuing import accept_price, continued_spec  # imports the judge's parts

    with Client() as client:
        body = continued_spec(client, continued, by_work=by_work)
        accept_price(client.ablations.plan(body), accepted=yes)
    return body
