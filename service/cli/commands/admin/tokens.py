"""`ablate admin tokens`: the tokens of people and programs, and what each may do."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.reporting import wording
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, names, texts
from ablate.service.cli import completion
from ablate.service.cli.arguments import GraceOption, ReasonOption
from ablate.service.cli.output import JsonOption, guarded, out, print_json, print_secret
from ablate.service.client.api import Client
from ablate.service.schemas.tokens import Identity, TokenList, TokenPublic

app = typer.Typer(name="tokens", help="Tokens of people and programs.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The token's name.", autocompletion=completion.tokens)
]
MinutesOption = Annotated[
    float | None,
    typer.Option("--device-minutes", min=0, help="Quota for all its ablations together. Default: no limit."),
]


class HumanScope(StrEnum):
    """Scopes of tokens for people. Each includes the ones before it."""

    READ = "read"
    SUBMIT = "submit"
    CODE = "code"
    OPERATE = "operate"
    ADMIN = "admin"


@app.command()
@guarded
def create(
    name: NameArgument,
    scope: Annotated[HumanScope, typer.Option(help="What the token may do. Each scope includes the ones before it.")],
    device_minutes: MinutesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print its secret once."""
    with Client() as client:
        secret = client.tokens.create(name, scope=scope, device_minutes=device_minutes)
    print_secret(secret, as_json=as_json)


@app.command("list")
@guarded
def list_(as_json: JsonOption = False) -> None:
    """List all tokens and node keys with scope, quota and use. The service keeps no secrets."""
    with Client() as client:
        tokens = client.tokens.list()
    print_json(tokens) if as_json else out().print(_table(tokens))


@app.command()
@guarded
def rotate(name: NameArgument, grace_hours: GraceOption = 24.0, as_json: JsonOption = False) -> None:
    """Replace the secret of a token. The old secret stays valid for a while."""
    with Client() as client:
        secret = client.tokens.rotate(name, grace_s=grace_hours * 3600)
    print_secret(secret, as_json=as_json)


@app.command("end-old")
@guarded
def end_old(name: NameArgument, as_json: JsonOption = False) -> None:
    """End the replaced secrets of a token before their grace period is over."""
    with Client() as client:
        _print(client.tokens.end_old(name), as_json=as_json)


@app.command()
@guarded
def quota(
    name: NameArgument,
    device_minutes: MinutesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the quota for all ablations of a token together. Submitted ablations go on."""
    with Client() as client:
        _print(client.tokens.set_quota(name, device_minutes), as_json=as_json)


@app.command()
@guarded
def revoke(name: NameArgument, reason: ReasonOption) -> None:
    """End a token. Its ablations stay, and operators can still change them."""
    with Client() as client:
        client.tokens.revoke(name, reason=reason)
    out().print(f"token {escape(name)} is revoked; other API processes learn of it within 10 s")


@app.command()
@guarded
def whoami(as_json: JsonOption = False) -> None:
    """Show the name, scope and used quota of this token."""
    with Client() as client:
        identity = client.tokens.identity()
    if as_json:
        print_json(identity)
        return
    out().print(f"{escape(identity.name)} with scope {identity.scope}; device minutes used: {_quota(identity)}")


def _print(token: TokenPublic, *, as_json: bool) -> None:
    print_json(token) if as_json else out().print(_table(TokenList(items=[token])))


def _table(tokens: TokenList) -> TerminalTable:
    table = TerminalTable(
        *names("name", "scope", "class", "device minutes"), *texts("secrets", "revoked", "created"), title="tokens"
    )
    for row in tokens.items:
        table.add_row(
            escape(row.name),
            row.scope,
            row.node_class or "",
            _quota(row),
            _secrets(row),
            "" if row.revoked_at is None else escape(f"{wording.moment(row.revoked_at)}: {row.reason}"),
            escape(f"{wording.moment(row.created_at)} by {row.created_by}"),
        )
    return table


def _secrets(row: TokenPublic) -> str:
    old = [secret.ends_at for secret in row.secrets if secret.ends_at is not None]
    return "".join([str(len(row.secrets)), *(f", one until {wording.moment(at)}" for at in old)])


def _quota(token: TokenPublic | Identity) -> str:
    used = wording.fixed(token.device_minutes_used, 1)
    quota = used if token.device_minutes is None else f"{used} of {wording.number(token.device_minutes)}"
    reserved = token.device_minutes_reserved
    return f"{quota}, {wording.fixed(reserved, 1)} reserved" if reserved else quota
