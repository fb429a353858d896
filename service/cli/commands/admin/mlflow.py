"""`ablate admin mlflow rebuild`: write all ablations to MLflow again.

This needs the database but not the embedded stack, so it also works in the service's image.
"""

import time
from typing import TYPE_CHECKING

import typer

from ablate.experiments.reporting import wording
from ablate.service.cli.output import JsonOption, guarded, out, print_json
from ablate.service.errors import StackError
from ablate.service.lifecycle import OutboxKind
from ablate.service.settings import get_settings

if TYPE_CHECKING:
    from ablate.service.store.session import Store

app = typer.Typer(name="mlflow", help="The ablations in MLflow.", no_args_is_help=True)

_POLL_S = 0.5
_PATIENCE_S = 600.0


@app.callback()
def _group() -> None:
    """Work on the ablations in MLflow."""


@app.command()
@guarded
def rebuild(as_json: JsonOption = False) -> None:
    """Write every ablation to MLflow again. Needs the database (ABLATE_DATABASE_URL) and a background process."""
    total = rebuild_all(get_settings().sqlalchemy_url, patience_s=_PATIENCE_S)
    if as_json:
        print_json({"projected": total})
    else:
        out().print(f"wrote {wording.counted(total, 'ablation')} to MLflow again")


def rebuild_all(database_url: str, *, patience_s: float) -> int:
    """Request the projection of every finished ablation, wait for all of them, and return their number.

    Raises StackError if the background process does not finish within `patience_s` seconds.
    """
    from ablate.service.store.ablations.results import ask_for_projections
    from ablate.service.store.session import Store

    store = Store(database_url)
    try:
        with store.write() as connection:
            count = ask_for_projections(connection)
        deadline = time.monotonic() + patience_s
        while left := _projections_left(store):
            if time.monotonic() > deadline:
                raise StackError(
                    f"{left} ablations are not in MLflow after {patience_s:.0f} s; does the background process run?"
                )
            time.sleep(_POLL_S)
    finally:
        store.close()
    return count


def _projections_left(store: "Store") -> int:
    from ablate.service.store import outbox

    with store.read() as connection:
        backlog = {kind: count for kind, count, _ in outbox.backlog(connection)}
    return backlog.get(OutboxKind.PROJECT, 0) + backlog.get(OutboxKind.ANNOUNCE, 0)
