"""Submit a spec, follow its ablation, show how it ended."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from experiments.outcomes import AblationState, ExitCode
from experiments.reporting import wording
from service.cli import show
from service.cli.output import err, out, print_json_line
from service.cli.watch import follow, follow_as_json
from service.client.api import Client
from service.schemas.ablations import AblationPublic
from service.schemas.submissions import AblationAccepted, SpecBody

if TYPE_CHECKING:
    from experiments.analysis.verdicts import Verdict

ShowEnd: TypeAlias = Callable[[Client, str], None]
"""Shows how an ablation with this id has ended, in place of its verdict."""

KeyOption = Annotated[
    str | None, typer.Option(help="The same key with the same spec is the same ablation; default: a new one.")
]


def run_spec(
    spec: SpecBody, *, idempotency_key: str | None = None, as_json: bool, show_end: ShowEnd | None = None
) -> "Verdict":
    """Submit `spec`, watch it, show how it ended (its verdict, if nothing else is asked for) and return the verdict."""
    with Client() as client:
        answer = client.ablations.submit(spec, idempotency_key=idempotency_key)
        print_json_line(accepted=answer) if as_json else announce(out(), answer)
        return follow_to_end(client, answer.id, as_json=as_json, show_end=show_end)


def announce(console: Console, answer: AblationAccepted) -> None:
    """Say what was accepted, what it will not get, and the three commands that a person wants next."""
    console.print(f"[bold]{escape(answer.name)}[/] accepted as [bold]{answer.id}[/] ({answer.state})")
    console.print(show.warnings(answer.warnings))
    console.print(f"  follow   ablate watch {answer.id}")
    console.print(f"  answer   ablate verdict {answer.id} --explain")
    console.print(f"  stop     ablate cancel {answer.id}")


def follow_to_end(client: Client, ablation_id: str, *, as_json: bool, show_end: ShowEnd | None = None) -> "Verdict":
    """Follow to the end, show how it ended and return the verdict; exit 5 when the ablation ended as it should not."""
    try:
        row = follow_as_json(client, ablation_id) if as_json else follow(client, ablation_id, out())
    except KeyboardInterrupt:
        err().print(f"detached; {ablation_id} goes on. Come back: ablate watch {ablation_id}")
        raise typer.Exit(ExitCode.DETACHED) from None
    verdict = None if row.state == AblationState.CANCELLED else client.ablations.verdict(ablation_id)
    if as_json:
        print_json_line(ablation=row, **({} if verdict is None else {"verdict": verdict}))
    elif show_end is not None and row.state == AblationState.COMPLETED:
        show_end(client, ablation_id)
    else:
        _show_end(row, verdict)
    if verdict is None or row.state != AblationState.COMPLETED:
        raise typer.Exit(ExitCode.ERROR)
    return verdict


def _show_end(row: AblationPublic, verdict: "Verdict | None") -> None:
    if verdict is None:
        out().print(f"{row.id} was cancelled; what it measured is kept: ablate show {row.id}")
        return
    if row.state == AblationState.FAILED:
        why = row.answer or f"{wording.counted(row.blocks.failed, 'block')} could not be run"
        out().print(f"{row.id} [red]failed[/]: {escape(why)}; ablate show {row.id}")
    from service.cli import show_verdict  # with all that a verdict needs, when there is one

    out().print(show_verdict.verdict(verdict))
