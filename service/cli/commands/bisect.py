"""`ablate bisect`: which commit made the difference, by ablations of a few commits at a time."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.outcomes import ExitCode
from ablate.experiments.reporting import wording
from ablate.service.cli.output import StreamOption, err, guarded, out, print_json_line

app = typer.Typer()


@app.command()
@guarded
def bisect(
    spec: Annotated[
        Path,
        typer.Argument(metavar="SPEC", help="The file of a spec: a command with a folder of code in a repository."),
    ],
    good: Annotated[str, typer.Option(metavar="REVISION", help="A commit before the change.")],
    bad: Annotated[str, typer.Option(metavar="REVISION", help="A commit after it.")] = "HEAD",
    at_once: Annotated[int, typer.Option(min=1, max=15, help="Commits that one ablation compares.")] = 3,
    as_json: StreamOption = False,
) -> None:
    """Find the commit between two that made the difference: measure a few, and stop at a probability of 95 %.

    The metric, the blocks and the arguments are the spec's; its variants do not run. Typed again, it goes on.

    The exit code is 0 if it found the commits; 2 or 3 if good and bad are the same, or no difference is proved;
    3 if several commits share the blame.
    """
    from ablate.service.cli.commits.bisecting import answer_lines, found, history_of, search, values_of

    values = values_of(spec, "bisect compares commits of its baseline")
    history = history_of(spec.parent / values["workload"]["code"], good, bad)
    err().print(f"{wording.counted(len(history.commits), 'commit')} between them change the code")
    bisection = search(spec.parent, values, history, at_once=at_once, as_json=as_json)
    if as_json:
        print_json_line(bisection=found(bisection, history))
    else:
        first, *others = answer_lines(bisection, history)
        out().print(f"[bold]{escape(first)}[/]")
        for line in others:
            out().print(escape(line))
    is_found = bisection.other_level() is None and bisection.culprits() is not None
    raise typer.Exit(ExitCode.DONE if is_found else ExitCode.INCONCLUSIVE)
