"""`ablate try`: one proposal of a session against its incumbent; the exit code is the answer."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ablate.experiments.outcomes import PROPOSAL_EXIT_CODES, AblationState, ExitCode, ProposalOutcome
from ablate.service.cli import completion, proposing
from ablate.service.cli.arguments import is_spec, print_packed, read_spec
from ablate.service.cli.follow import KeyOption, follow, print_accepted
from ablate.service.cli.output import JsonOption, err, guarded, out, print_json
from ablate.service.client.api import Client

if TYPE_CHECKING:
    from ablate.service.schemas.sessions import ProposalAccepted, SessionPath
    from ablate.service.schemas.submissions import SpecBody

app = typer.Typer()


@app.command("try")
@guarded
def try_(
    proposal: Annotated[
        list[str],
        typer.Argument(
            metavar="-- SPEC | COMMAND...",
            help="A spec whose one variant is proposed, or the command of a session of commands. It begins with the "
            "session's command; its other arguments are merged into the incumbent's. The current folder is its code.",
        ),
    ],
    session: Annotated[
        str,
        typer.Option(
            "--session",
            metavar="NAME",
            help="The session (`ablate sessions`).",
            autocompletion=completion.sessions,
        ),
    ],
    note: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What you change and why, for the session's page; one line.")
    ] = None,
    idempotency_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Propose one change of a session's incumbent, wait, and say: keep, discard or undecided.

    The exit code is 0 for keep, 1 for discard, 3 for undecided, 5 for an error.

    Each proposal spends a part of the session's error budget, also an undecided, broken or cancelled one.
    """
    with Client() as client:
        if len(proposal) == 1 and is_spec(proposal[0]):
            body = read_spec(proposal[0])
        else:
            body = _of_command(client.sessions.get(session), proposal)
        if note is not None:
            body = proposing.noted(body, note)
        accepted = client.sessions.propose(session, body, idempotency_key=idempotency_key)
        try:
            outcome = _answer(client, accepted, as_json=as_json)
        except KeyboardInterrupt:
            own = accepted.accepted.id
            err().print(f"detached; proposal {accepted.number} goes on. Come back: ablate watch {own}")
            raise typer.Exit(ExitCode.DETACHED) from None
    raise typer.Exit(PROPOSAL_EXIT_CODES[outcome])


def _of_command(path: "SessionPath", command: Sequence[str]) -> "SpecBody":
    """Return the incumbent's spec with the command as its variant, and the current folder as its code."""
    from ablate.service.schemas.submissions import SpecBody

    values = proposing.values_of_command(path, command)
    body = SpecBody.of(values)
    print_packed(body)
    args = shlex.join(values["variants"][proposing.PROPOSAL]["args"])
    err().print(f"[dim]arguments of the proposal: {escape(args) or 'none'}[/]")
    return body


def _answer(client: Client, accepted: "ProposalAccepted", *, as_json: bool) -> ProposalOutcome:
    """Wait for the answer, print it and return it."""
    console = out()
    if not as_json:
        console.print(proposing.heading(accepted))
        print_accepted(console, accepted.accepted)
        follow(client, accepted.accepted.id, console)
    proposal = client.sessions.wait(accepted)
    answer = client.sessions.answer(accepted)
    verdict = None if proposal.state == AblationState.CANCELLED else client.ablations.verdict(proposal.ablation_id)
    outcome = answer.outcome or ProposalOutcome.UNDECIDED
    if as_json:
        print_json({**answer.model_dump(mode="json"), "outcome": outcome, "verdict": verdict})
        return outcome
    if verdict is not None:
        from ablate.service.cli import (
            verdict_tables,  # imports the statistics, which the rest of this command does not need
        )

        console.print(verdict_tables.verdict(verdict))
    console.print(proposing.closing(answer))
    return outcome
