"""How people name things: an ablation by name, id, a beginning of one or `latest`; a trial by its place in one."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

import typer
from rich.markup import escape

from experiments.block_numbers import block_index, block_list, block_name
from experiments.design.problems import nearest
from experiments.errors import SpecError, SpecProblem
from experiments.ids import CALLED_PATTERN
from experiments.outcomes import TrialState
from service.cli import completion
from service.cli.output import err
from service.errors import Ambiguous, NotFound

if TYPE_CHECKING:
    from service.client.api import Client
    from service.schemas.ablations import TrialPublic

CALLED = "its name, its id, a beginning that only it has, or `latest`"

AblationArgument = Annotated[
    str,
    typer.Argument(metavar="ABLATION", help=f"The ablation: {CALLED}.", autocompletion=completion.ablations),
]
JudgedArgument = Annotated[
    str,
    typer.Argument(
        metavar="ABLATION",
        help=f"The ablation: {CALLED}; or a bundle, which is judged here, without a service.",
        autocompletion=completion.ablations,
    ),
]
TrialArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRIAL",
        help="ABLATION/BLOCK/ARM, for example latest/2/psiv-on; ABLATION alone: what runs or ran last; or an id.",
        autocompletion=completion.trials,
    ),
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", autocompletion=completion.nodes)]
RegisteredNodeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NODE", help="The node's name, or a beginning that only it has.", autocompletion=completion.nodes
    ),
]


def ablation_id(client: "Client", called: str) -> str:
    """Return the id of the ablation that is called so, and say which one that is where the word leaves it open.

    Raises NotFound for what no ablation can be called.
    """
    if not names_an_ablation(called):
        raise NotFound(_no_name(called))
    if called == client.ablations.id_of(called):
        return called
    row = client.ablations.find(called)
    if called != row.name:
        err().print(f"[dim]{escape(called)} is {escape(row.name)}, {row.id}[/]")
    return row.id


def _no_name(called: str) -> str:
    if Path(called).exists():
        return f"{called!r} is there, and is neither a bundle nor the name of an ablation"
    only = "names and ids have letters, digits, '-' and '_' only"
    return f"there is no file {called!r}, and no ablation can be called so: {only}"


def names_an_ablation(called: str) -> bool:
    """Say whether an ablation can be called so."""
    return re.fullmatch(CALLED_PATTERN, called) is not None


class _Named(Protocol):
    @property
    def name(self) -> str: ...


NamedRow = TypeVar("NamedRow", bound=_Named)


def chosen(rows: Sequence[NamedRow], names: Sequence[str], *, unknown: str) -> list[NamedRow]:
    """Return the rows of these names, all without any.

    Raises SpecError for every name that is none: `unknown`, with {!r} for the name, and what is meant.
    """
    known = [row.name for row in rows]
    wrong = [
        SpecProblem(pointer=name, detail=unknown.format(name), hint=nearest(name, known))
        for name in names
        if name not in known
    ]
    if wrong:
        raise SpecError(wrong)
    return [row for row in rows if not names or row.name in names]


def node_name(client: "Client", called: str) -> str:
    """Return the node of this name or beginning. Raises Ambiguous; what fits none is left to the service to refuse."""
    found = _called(called, [row.name for row in client.nodes()])
    if len(found) > 1:
        raise Ambiguous(f"{called!r} is the beginning of several nodes: {', '.join(found)}")
    return found[0] if found else called


def trial_id(client: "Client", called: str) -> str:
    """Return the id of a trial; raises NotFound or Ambiguous with what there is."""
    return called if called.startswith("trl_") else trial_at(client, called).id


def trial_at(client: "Client", called: str) -> "TrialPublic":
    """Return the trial at ABLATION/BLOCK/ARM, or what runs or ran last; raises NotFound or Ambiguous."""
    ablation, _, place = called.partition("/")
    trials = list(client.ablations.trials(ablation_id(client, ablation)))
    chosen = _at(trials, place) if place else _last(trials)
    if place.count("/") == 0:
        err().print(f"[dim]{block_name(chosen.block_index)}, {escape(chosen.arm)}, {chosen.state}[/]")
    return chosen


def _last(trials: "list[TrialPublic]") -> "TrialPublic":
    """Return the trial that runs, else the one that ran last."""
    waits = (TrialState.QUEUED, TrialState.CANCELLED)
    begun = [trial for trial in trials if trial.state not in waits] or trials[:1]
    return next((trial for trial in begun if trial.runs_now), begun[-1])


def _at(trials: "list[TrialPublic]", place: str) -> "TrialPublic":
    number, _, arm = place.partition("/")
    index = block_index(int(number)) if number.isascii() and number.isdigit() else -1
    block = [trial for trial in trials if trial.block_index == index]
    if not block:
        known = block_list(sorted({trial.block_index for trial in trials}))
        raise NotFound(f"{number!r} is no block of it; blocks: {known}")
    name = _arm(arm, [trial.arm for trial in block]) if arm else _last(block).arm
    return next(trial for trial in block if trial.arm == name)


def _arm(called: str, known: Sequence[str]) -> str:
    found = _called(called, known)
    if not found:
        raise NotFound(f"there is no arm {called!r}; arms: {', '.join(known)}")
    if len(found) > 1:
        raise Ambiguous(f"{called!r} is the beginning of several arms: {', '.join(found)}")
    return found[0]


def _called(called: str, known: Sequence[str]) -> list[str]:
    return [called] if called in known else [name for name in known if name.startswith(called)]
