"""How commands print a fresh secret: alone on standard output, so that it can go into a file; remarks beside it."""

from typing import Annotated

import typer
from rich.markup import escape

from service.cli.output import err, print_json
from service.schemas.tokens import TokenSecret

GraceOption = Annotated[
    float, typer.Option("--grace-hours", min=0, max=24 * 365, help="So long does the secret before it count.")
]
ReasonOption = Annotated[str, typer.Option(help="Why; people will read it.")]
S_PER_HOUR = 3600.0
_OF_NODE = "give it to the worker as ABLATE_WORKER_TOKEN, with ABLATE_NODE_NAME={}"


def print_secret(found: TokenSecret, *, as_json: bool) -> None:
    """Print the secret, and what to do with it."""
    if as_json:
        print_json(found)
        return
    use = "give it as ABLATE_TOKEN" if found.node is None else _OF_NODE.format(escape(found.node))
    err().print(f"secret of [bold]{escape(found.name)}[/], shown this once; {use}:")
    typer.echo(found.secret)
