"""`ablate admin notifications`: where this token is told about the end of its ablations."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.design.problems import nearest
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, ids, names, numbers, texts
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client
from ablate.service.schemas.notifications import NotificationPublic

app = typer.Typer(name="notifications", help="Messages about the end of this token's ablations.", no_args_is_help=True)
_KINDS = ("webhook", "slack", "email")


def _kind(text: str) -> str:
    if text not in _KINDS:
        hint = nearest(text, _KINDS)
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_KINDS)}{'' if hint is None else '; ' + hint}")
    return text


@app.command("list")
@guarded
def list_(as_json: JsonOption = False) -> None:
    """List the notifications of this token, with what was sent; operators see all."""
    with Client() as client:
        rows = client.notifications.list()
    print_json(rows) if as_json else out().print(_table(rows))


@app.command()
@guarded
def add(
    kind: Annotated[str, typer.Argument(metavar="KIND", parser=_kind, help="webhook, slack or email.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An https address, or an e-mail address.")],
    as_json: JsonOption = False,
) -> None:
    """Send a message there at the end of each later ablation of this token."""
    with Client() as client:
        made = client.notifications.add(kind, target)
    if as_json:
        print_json(made)
        return
    out().print(_table([made.notification]))
    if made.secret is not None:
        out().print(f"messages are signed with {made.secret}, which cannot be read again", soft_wrap=True)


@app.command()
@guarded
def remove(
    notification: Annotated[str, typer.Argument(metavar="NOTIFICATION", help="The id of a notification.")],
    as_json: JsonOption = False,
) -> None:
    """Send no more messages there."""
    with Client() as client:
        rows = client.notifications.remove(notification)
    print_json(rows) if as_json else out().print(_table(rows))


def _table(rows: Sequence[NotificationPublic]) -> TerminalTable:
    table = TerminalTable(
        *ids("notification"), *names("owner", "kind", "to"), *numbers("sent", "waiting"), *texts("problem")
    )
    for row in rows:
        counts = (f"{row.sent:,}", f"{row.waiting:,}")
        table.add_row(row.id, escape(row.owner), row.kind, escape(row.target), *counts, escape(row.problem or ""))
    return table
