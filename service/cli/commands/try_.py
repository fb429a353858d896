"""`ablate try`: one proposal of a session against its incumbent; the exit code is the answer."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.outcomes import PROPOSAL_EXIT_CODES, AblationState, ExitCode, ProposalOutcome
from ablate.experiments.system.shell_python import in_shell_python
from ablate.service.cli import completion
from ablate.service.cli.arguments import is_spec, print_packed, read_spec
from ablate.service.cli.follow import KeyOption, follow, print_accepted
from ablate.service.cli.output import JsonOption, err, guarded, out, print_json
from ablate.service.client.api import Client

if TYPE_CHECKING:
    from ablate.service.schemas.sessions import ProposalAccepted, SessionPath
    from ablate.service.schemas.submissions import SpecBody

app = typer.Typer()

PROPOSAL = "proposal"
"""Name of the variant of a command."""


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
            body = _noted(body, note)
        accepted = client.sessions.propose(session, body, idempotency_key=idempotency_key)
        try:
            outcome = _answer(client, accepted, as_json=as_json)
        except KeyboardInterrupt:
            own = accepted.accepted.id
            err().print(f"detached; proposal {accepted.number} goes on. Come back: ablate watch {own}")
            raise typer.Exit(ExitCode.DETACHED) from None
    raise typer.Exit(PROPOSAL_EXIT_CODES[outcome])


def _of_command(path: "SessionPath", command: Sequence[str]) -> "SpecBody":
    """Return the incumbent's spec with the command as its variant. Raises SpecError."""
    from ablate.experiments.design.aa_spec import CONTENT_TYPE
    from ablate.experiments.design.arguments import merged_arguments
    from ablate.experiments.design.load import load_values
    from ablate.experiments.design.workload import ARCHIVE, BY_ARM
    from ablate.experiments.outcomes import BASELINE
    from ablate.service.schemas.submissions import SpecBody

    values = load_values(path.spec.encode(), CONTENT_TYPE)
    workload: dict[str, Any] = values["workload"]
    shared = workload.get("command")
    if shared is not None and list(command[: len(shared)]) != shared:
        command = in_shell_python(command).argv
    if shared is None or list(command[: len(shared)]) != shared:
        raise SpecError([_other_command(path.name, shared, command)])
    own = (values.get("baseline") or {}).get("args") or ()
    variant: dict[str, Any] = {"args": list(merged_arguments(own, command[len(shared) :]))}
    if isinstance(workload.get("code"), Mapping) and ARCHIVE in workload["code"]:
        variant["code"] = "."
    for key in workload.keys() & set(BY_ARM):
        workload[key] = {arm: one for arm, one in workload[key].items() if arm in (BASELINE, PROPOSAL)}
    values["ablation"] = f"{path.name[:50]}-{path.proposals + 1}"
    values["variants"] = {PROPOSAL: variant}
    body = SpecBody.of(values)
    print_packed(body)
    err().print(f"[dim]arguments of the proposal: {escape(shlex.join(variant['args'])) or 'none'}[/]")
    return body


def _noted(body: "SpecBody", note: str) -> "SpecBody":
    """Return the spec with a note among its labels."""
    from ablate.experiments.analysis.proposals import NOTE
    from ablate.experiments.design.aa_spec import CONTENT_TYPE
    from ablate.experiments.design.load import load_values
    from ablate.experiments.design.spec_yaml import spec_yaml

    values = load_values(body.content, body.content_type)
    values["labels"] = {**(values.get("labels") or {}), NOTE: note}
    return replace(body, content=spec_yaml(values), content_type=CONTENT_TYPE)


def _other_command(session: str, shared: list[str] | None, command: Sequence[str]) -> SpecProblem:
    proposed = shlex.join(command)
    if shared is None:
        detail = f"session '{session}' trains a recipe, so a proposal is a spec; given: {proposed}"
        return SpecProblem(pointer="COMMAND", detail=detail, hint=f"begin with: ablate sessions spec {session}")
    detail = f"the command must begin with that of session '{session}': {shlex.join(shared)}; given: {proposed}"
    hint = "arguments that proposals change belong to baseline.args of the spec that opens a session"
    return SpecProblem(pointer="COMMAND", detail=detail, hint=hint)


def _answer(client: Client, accepted: "ProposalAccepted", *, as_json: bool) -> ProposalOutcome:
    """Wait for the answer, print it and return it."""
    console = out()
    if not as_json:
        whom = f"proposal {accepted.incumbent}" if accepted.incumbent else "the session's first baseline"
        console.print(f"proposal {accepted.number} of {escape(accepted.session)} against {whom}", end=", ")
        console.print(f"tested at {100 * accepted.level:.2g} %")
        print_accepted(console, accepted.accepted)
        follow(client, accepted.accepted.id, console)
    proposal = client.sessions.wait(accepted)
    session = client.sessions.get(accepted.session)
    verdict = None if proposal.state == AblationState.CANCELLED else client.ablations.verdict(proposal.ablation_id)
    outcome = proposal.outcome or ProposalOutcome.UNDECIDED
    if as_json:
        plain = session.model_dump(mode="json", exclude={"path", "spec", "whole"})
        print_json({"outcome": outcome, "proposal": proposal, "session": plain, "verdict": verdict})
        return outcome
    if verdict is not None:
        from ablate.service.cli import (
            verdict_tables,  # imports the statistics, which the rest of this command does not need
        )

        console.print(verdict_tables.verdict(verdict))
    then = "it is the incumbent now" if outcome is ProposalOutcome.KEEP else "the incumbent stays"
    console.print(f"[bold]{outcome}[/]: {then}; the next proposal is tested at {100 * session.next_level:.2g} %")
    return outcome
