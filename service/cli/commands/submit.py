"""`ablate submit`: submit a spec and return."""

import typer

from ablate.service.cli.arguments import CommitOption, SpecArgument, read_spec
from ablate.service.cli.follow import KeyOption, print_accepted
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def submit(
    spec: SpecArgument,
    commit: CommitOption = None,
    idempotency_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a spec and return at once."""
    with Client() as client:
        answer = client.ablations.submit(read_spec(spec, commit), idempotency_key=idempotency_key)
    if as_json:
        print_json(answer)
    else:
        print_accepted(out(), answer)
