"""`ablate mlflow rebuild`: needs the database and no part of the embedded stack, so that the service's image has it."""

import time
from typing import TYPE_CHECKING

import typer

from experiments.reporting import wording
from service.cli.output import JsonOption, guarded, out, print_json
from service.errors import StackError
from service.lifecycle import OutboxKind
from service.settings import get_settings

if TYPE_CHECKING:
    from service.store.session import Store

app = typer.Typer(name="mlflow", help="The review pages in MLflow.", no_args_is_help=True)

_LOOK_EVERY_S = 0.5
_PATIENCE_S = 600.0


@app.callback()
def _group() -> None:
    """Work on the review pages in MLflow."""


@app.command()
@guarded
def rebuild(as_json: JsonOption = False) -> None:
    """Project every ablation again; needs the database (ABLATE_DATABASE_URL) and a running background process."""
    total = rebuild_all(get_settings().sqlalchemy_url, patience_s=_PATIENCE_S)
    if as_json:
        print_json({"projected": total})
    else:
        out().print(f"projected {wording.counted(total, 'ablation')} again")


def rebuild_all(database_url: str, *, patience_s: float) -> int:
    """Ask for the projection of every ablation that has ended and wait until it is done; return how many there are.

    Raises StackError when the background process did not get through in time.
    """
    from service.store.ablations.results import ask_for_projections
    from service.store.session import Store

    store = Store(database_url)
    try:
        with store.write() as connection:
            count = ask_for_projections(connection)
        deadline = time.monotonic() + patience_s
        while left := _projections_left(store):
            if time.monotonic() > deadline:
                raise StackError(f"{left} projections are still waiting after {patience_s:.0f} s; is the stack up?")
            time.sleep(_LOOK_EVERY_S)
    finally:
        store.close()
    return count


def _projections_left(store: "Store") -> int:
    from service.store import outbox

    with store.read() as connection:
        left = {kind: count for kind, count, _ in outbox.backlog(connection)}
    return left.get(OutboxKind.PROJECT, 0) + left.get(OutboxKind.ANNOUNCE, 0)
