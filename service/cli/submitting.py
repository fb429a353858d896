"""Submit a spec, follow its ablation, show how it ended."""

import typer
from rich.console import Console
from rich.markup import escape

from experiments.outcomes import ERROR_EXIT_CODE, AblationState
from service.cli import show
from service.cli.output import err, out
from service.cli.watch import follow, follow_as_json
from service.client import Client
from service.schemas.ablations import AblationPublic
from service.schemas.submissions import AblationAccepted, SpecBody


def run_spec(spec: SpecBody, *, as_json: bool) -> None:
    """Submit `spec`, watch it and show the verdict."""
    with Client() as client:
        answer = client.ablations.submit(spec)
        if not as_json:
            announce(out(), answer)
        follow_to_end(client, answer.id, as_json=as_json)


def announce(console: Console, answer: AblationAccepted) -> None:
    """Say what was accepted and print the three commands that a person wants next."""
    console.print(f"[bold]{escape(answer.name)}[/] accepted as [bold]{answer.id}[/] ({answer.state})")
    console.print(f"  follow   ablate watch {answer.id}")
    console.print(f"  answer   ablate verdict {answer.id} --explain")
    console.print(f"  stop     ablate cancel {answer.id}")


def follow_to_end(client: Client, ablation: str, *, as_json: bool) -> None:
    """Follow to the end and show the verdict; exit 5 when the ablation ended without one."""
    try:
        row = follow_as_json(client, ablation) if as_json else follow(client, ablation, out())
    except KeyboardInterrupt:
        err().print(f"detached; {ablation} goes on. Come back: ablate watch {ablation}")
        raise typer.Exit(0) from None
    if not as_json:
        show_end(client, row)
    if row.state != AblationState.COMPLETED:
        raise typer.Exit(ERROR_EXIT_CODE)


def show_end(client: Client, row: AblationPublic) -> None:
    """Show how an ablation ended: its verdict where there is one."""
    if row.state == AblationState.CANCELLED:
        out().print(f"{row.id} was cancelled; what it measured is kept: ablate show {row.id}")
        return
    if row.state == AblationState.FAILED:
        out().print(f"{row.id} [red]failed[/]: {row.blocks.failed} blocks could not be run; ablate show {row.id}")
    out().print(show.verdict(client.ablations.verdict(row.id)))
