"""`ablate open`: sign a browser in to the service's pages, with a link that works once."""

import webbrowser
from typing import Annotated
from urllib.parse import urlencode

import typer

from ablate.service.cli import completion
from ablate.service.cli.arguments import ABLATION_NAMES, ablation_id
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command("open")
@guarded
def open_(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[ABLATION | SESSION]",
            help=f"The ablation: {ABLATION_NAMES}. Or the whole name of a session, which comes before an ablation of "
            "that name. Default: the overview.",
            autocompletion=completion.pages,
        ),
    ] = None,
    operate: Annotated[
        bool,
        typer.Option("--operate", help="Also allow draining and resuming nodes, cancelling, and changing priorities."),
    ] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print the link without opening a browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Open the pages in a browser, signed in as this token, to read. The link works once, within two minutes."""
    with Client() as client:
        to = f"&{urlencode({'to': _page(client, name)})}" if name else ""
        link = client.tokens.sign_in(operate=operate)
        url = f"{client.url}{link.path}{to}"
    if as_json:
        print_json({"url": url, "scope": link.scope, "lasts_s": link.lasts_s})
        return
    out().print(url, soft_wrap=True)
    if not only_print:
        webbrowser.open(url)


def _page(client: Client, name: str) -> str:
    """Return the path of a session or an ablation."""
    if any(session.name == name for session in client.sessions.list()):
        return f"/sessions/{name}"
    return f"/a/{ablation_id(client, name)}"
