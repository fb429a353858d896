"""`ablate nightly`: measure the newest commit of a branch beside earlier ones, and tell what two ablations prove."""

from pathlib import Path
from typing import Annotated

import typer

from ablate.service.cli.output import StreamOption, guarded

app = typer.Typer()


@app.command()
@guarded
def nightly(  # noqa: PLR0913, PLR0917 - a command's options are its function's arguments
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC", help="The file of a spec: a command with a folder of code in a repository."),
    ],
    pin: Annotated[
        str,
        typer.Option(metavar="REVISION", help="A commit or tag of the branch. Small losses add up against it."),
    ],
    repo: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The repository; then the spec's code is a folder below its root. Default: the origin of the "
            "repository around the spec's code.",
        ),
    ] = None,
    branch: Annotated[str, typer.Option(help="The branch to watch.")] = "main",
    every: Annotated[int, typer.Option(min=1, help="Wait for so many new commits that change the code.")] = 1,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Tell this receiver, an address of apprise, of a confirmed loss. Repeat it."
        ),
    ] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Find the commit of a confirmed loss at once.")] = False,
    as_json: StreamOption = False,
) -> None:
    """Compare the newest commit of a branch with the last accepted one and a pinned one, once: for cron or CI.

    If an ablation proves that it is worse, a second one must confirm that before anybody is told. Otherwise it is
    accepted. The service knows what earlier calls did, so a call goes on where one was ended.

    The exit code is 0 if the commit is accepted or nothing is new, 1 if it is confirmed to be worse, 4 if it was not
    compared, 5 if there is an error, such as a message of an earlier call that nobody took.
    """
    from ablate.service.cli.commits.watching import Options, watch

    options = Options(repo=repo, branch=branch, pin=pin, every=every, receivers=tuple(notify or ()), bisect=bisect)
    raise typer.Exit(watch(spec, options, as_json=as_json))
