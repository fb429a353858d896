"""`ablate tokens`: who may do what."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape

from experiments.reporting import wording
from experiments.reporting.terminal.terminal_table import TerminalTable, names, texts
from service.cli import completion
from service.cli.output import JsonOption, guarded, out, print_json
from service.cli.secret_output import S_PER_HOUR, GraceOption, ReasonOption, print_secret
from service.client.api import Client
from service.schemas.tokens import Identity, TokenList, TokenPublic

app = typer.Typer(name="tokens", help="Tokens of people and programs.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The token's name.", autocompletion=completion.tokens)
]
MinutesOption = Annotated[
    float | None, typer.Option("--device-minutes", min=0, help="What its ablations may use in all; default: no limit.")
]


class HumanScope(StrEnum):
    """What a token can be created for; each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"
    ADMIN = "admin"


@app.command()
@guarded
def create(
    name: NameArgument,
    scope: Annotated[HumanScope, typer.Option(help="What it may do; each scope includes the ones before it.")],
    device_minutes: MinutesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print its secret, once."""
    with Client() as client:
        found = client.tokens.create(name, scope=scope, device_minutes=device_minutes)
    print_secret(found, as_json=as_json)


@app.command("list")
@guarded
def list_(as_json: JsonOption = False) -> None:
    """Show every token and node key with what it may do and has used; secrets are not kept."""
    with Client() as client:
        found = client.tokens.list()
    print_json(found) if as_json else out().print(_table(found))


@app.command()
@guarded
def rotate(name: NameArgument, grace_hours: GraceOption = 24.0, as_json: JsonOption = False) -> None:
    """Replace the secret of a token; the one before it counts a while longer."""
    with Client() as client:
        found = client.tokens.rotate(name, grace_s=grace_hours * S_PER_HOUR)
    print_secret(found, as_json=as_json)


@app.command("end-old")
@guarded
def end_old(name: NameArgument, as_json: JsonOption = False) -> None:
    """End the secrets of a token that were replaced, before their grace is over."""
    with Client() as client:
        _show(client.tokens.end_old(name), as_json=as_json)


@app.command()
@guarded
def quota(
    name: NameArgument,
    device_minutes: MinutesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change what the ablations of a token may use in all. What was submitted before goes on."""
    with Client() as client:
        _show(client.tokens.set_quota(name, device_minutes), as_json=as_json)


@app.command()
@guarded
def revoke(name: NameArgument, reason: ReasonOption) -> None:
    """End a token. What it submitted stays, and operators may still change it."""
    with Client() as client:
        client.tokens.revoke(name, reason=reason)
    out().print(f"token {escape(name)} is revoked; other API processes know within 10 s")


@app.command()
@guarded
def whoami(as_json: JsonOption = False) -> None:
    """Show whose token this is, what it may do and what it has used."""
    with Client() as client:
        found = client.tokens.identity()
    if as_json:
        print_json(found)
        return
    quota = _quota(found)
    out().print(f"{escape(found.name)} with scope {found.scope}; device minutes used: {quota}")


def _show(found: TokenPublic, *, as_json: bool) -> None:
    print_json(found) if as_json else out().print(_table(TokenList(items=[found])))


def _table(found: TokenList) -> TerminalTable:
    made = TerminalTable(
        *names("name", "scope", "class", "device minutes"), *texts("secrets", "revoked", "created"), title="tokens"
    )
    for row in found.items:
        made.add_row(
            escape(row.name),
            row.scope,
            row.node_class or "",
            _quota(row),
            _secrets(row),
            "" if row.revoked_at is None else escape(f"{wording.moment(row.revoked_at)}: {row.reason}"),
            escape(f"{wording.moment(row.created_at)} by {row.created_by}"),
        )
    return made


def _secrets(row: TokenPublic) -> str:
    old = [secret.ends_at for secret in row.secrets if secret.ends_at is not None]
    return "".join([str(len(row.secrets)), *(f", one until {wording.moment(at)}" for at in old)])


def _quota(found: TokenPublic | Identity) -> str:
    used = wording.fixed(found.device_minutes_used, 1)
    quota = used if found.device_minutes is None else f"{used} of {wording.number(found.device_minutes)}"
    return (
        f"{quota}, {wording.fixed(found.device_minutes_reserved, 1)} reserved"
        if found.device_minutes_reserved
        else quota
    )
