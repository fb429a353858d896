"""`ablate share`: links that show one report to people without a token, and code for other tokens."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.reporting import wording
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, ids, names, numbers, texts
from ablate.service.cli.arguments import AblationArgument, ablation_id
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client
from ablate.service.schemas.share_links import MOST_HOURS, ShareLinkPublic

app = typer.Typer()


@app.command()
@guarded
def share(
    ablation: AblationArgument,
    hours: Annotated[
        float, typer.Option(min=0.01, max=MOST_HOURS, help="How long the link is valid. Default: a week.")
    ] = 168.0,
    show_all: Annotated[bool, typer.Option("--list", help="Show the links of this ablation instead.")] = False,
    revoke: Annotated[str | None, typer.Option(metavar="LINK", help="End the link with this id instead.")] = None,
    code_with: Annotated[
        str | None, typer.Option(metavar="NAME", help="Let this token submit with the ablation's code instead.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a link that shows the report of an ablation, and nothing else, to anybody who has it."""
    with Client() as client:
        own = ablation_id(client, ablation)
        if code_with is not None:
            shared = client.ablations.share_code(own, name=code_with)
            archives = wording.counted(len(shared.digests), "more archive")
            print_json(shared) if as_json else out().print(f"{escape(code_with)} may use {archives} of {own}")
            return
        if show_all or revoke is not None:
            rows = client.ablations.shares(own) if revoke is None else client.ablations.end_share(own, revoke)
            print_json(rows) if as_json else out().print(_table(rows))
            return
        made = client.ablations.share(own, hours=hours)
        url = f"{client.url}{made.path}"
    if as_json:
        print_json({"url": url, "link": made.link})
        return
    out().print(url, soft_wrap=True)
    out().print(f"valid until {wording.moment(made.link.ends_at)}; end it: ablate share {own} --revoke {made.link.id}")


def _table(rows: Sequence[ShareLinkPublic]) -> TerminalTable:
    table = TerminalTable(*ids("link"), *names("by", "ends"), *texts("state"), *numbers("shown"), leaving=("by",))
    for row in rows:
        state = "valid" if row.is_valid else "ended" if row.revoked_at is None else "revoked"
        table.add_row(row.id, escape(row.created_by), wording.moment(row.ends_at), state, f"{row.uses:,}")
    return table
