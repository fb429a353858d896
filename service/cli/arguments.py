"""Arguments of commands: how users name a spec, an ablation, a trial or a node.

An ablation goes by its name, its id, a unique prefix of either, or `latest`. A trial goes by its id or its
place in an ablation.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, TypeVar

import typer
from rich.markup import escape

from ablate.experiments.block_numbers import block_index, block_list, block_name
from ablate.experiments.catalog.files import catalog_names, read_catalog_file
from ablate.experiments.design.problems import nearest
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.experiments.ids import CALLED_PATTERN
from ablate.experiments.outcomes import BlockState, TrialState
from ablate.experiments.system.logs import style_of
from ablate.service.cli import completion
from ablate.service.cli.output import err
from ablate.service.errors import Ambiguous, NotFound

if TYPE_CHECKING:
    from ablate.service.client.api import Client
    from ablate.service.schemas.ablations import TrialPublic
    from ablate.service.schemas.submissions import SpecBody

ABLATION_NAMES = "its name, its id, a unique prefix of either, or `latest`"

SpecArgument = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A spec file (YAML, JSON), - for standard input, or a catalog name.",
        autocompletion=completion.catalog,
    ),
]
CommitOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ARM=REVISION",
        help="Run the code of this arm as it is in a commit of its repository; `baseline` is the arm to compare with. "
        "May be repeated. The spec's code must be a folder beside it.",
    ),
]
SeedsOption = Annotated[
    str | None,
    typer.Option(
        metavar="SEED,SEED...", help="Choose these seeds, instead of those of the spec. A verdict names its seeds."
    ),
]
AblationArgument = Annotated[
    str,
    typer.Argument(metavar="ABLATION", help=f"The ablation: {ABLATION_NAMES}.", autocompletion=completion.ablations),
]
AblationOrBundleArgument = Annotated[
    str,
    typer.Argument(
        metavar="ABLATION",
        help=f"The ablation: {ABLATION_NAMES}. Or a bundle, which is judged here, without a service.",
        autocompletion=completion.ablations,
    ),
]
TrialArgument = Annotated[
    str,
    typer.Argument(
        metavar="TRIAL",
        help="ABLATION/BLOCK/ARM, for example latest/2/psiv-on. ABLATION alone means its running trial, or the last "
        "one that ran. Or a trial's id.",
        autocompletion=completion.trials,
    ),
]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", autocompletion=completion.nodes)]
RegisteredNodeArgument = Annotated[
    str,
    typer.Argument(metavar="NODE", help="The node's name, or a unique prefix of it.", autocompletion=completion.nodes),
]
GraceOption = Annotated[
    float, typer.Option("--grace-hours", min=0, max=24 * 365, help="How long the old secret stays valid, in hours.")
]
ClassArgument = Annotated[
    str, typer.Argument(metavar="CLASS", help="The node class.", autocompletion=completion.node_classes)
]
ReasonOption = Annotated[str, typer.Option(help="Why, for other people to read.")]


def duration(text: str, option: str) -> int:
    """Return the seconds of a duration such as 8h or 7d. Raises BadParameter, which names the option."""
    match = re.fullmatch("([1-9][0-9]{0,5})([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{option} is {text!r}; allowed: a whole number and s, m, h or d, such as 8h or 7d")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def is_spec(argument: str) -> bool:
    """Return whether the argument is standard input, a file or a catalog name."""
    return argument == "-" or Path(argument).is_file() or argument in catalog_names()


def read_spec(argument: str, commits: Sequence[str] | None = None, seeds: str | None = None) -> "SpecBody":
    """Return the spec that the argument names, and print which folders of code were packed for it.

    `commits` are the values of --commit, `seeds` that of --seeds. Raises SpecError, with the catalog's names if the
    argument names no spec.
    """
    body = _spec_of(argument, _commits(commits or ()))
    print_packed(body)
    return body if seeds is None else _with_seeds(body, seeds)


def _with_seeds(body: "SpecBody", text: str) -> "SpecBody":
    """Return the spec with these seeds, separated by commas. Raises SpecError."""
    from ablate.experiments.design.aa_spec import CONTENT_TYPE
    from ablate.experiments.design.load import load_values
    from ablate.experiments.design.spec_yaml import spec_yaml

    if not re.fullmatch(r"[0-9]{1,16}(,[0-9]{1,16})*", text):
        detail = f"--seeds is {text!r}; allowed: whole numbers with commas between them"
        raise SpecError([SpecProblem(pointer="--seeds", detail=detail, hint="--seeds 3,14,15")])
    values = load_values(body.content, body.content_type)
    values["design"] = {**(values.get("design") or {}), "seeds": [int(seed) for seed in text.split(",")]}
    return replace(body, content=spec_yaml(values), content_type=CONTENT_TYPE)


def print_packed(body: "SpecBody") -> None:
    """Print which folders of code were packed for a spec."""
    for line in body.packed_lines:
        err().print(escape(line), style=style_of(line))


def _commits(values: Sequence[str]) -> dict[str, str]:
    """Return revisions by arm. Raises SpecError for other text, and for an arm with two commits."""
    commits: dict[str, str] = {}
    for value in values:
        arm, sign, revision = value.partition("=")
        if not (arm and sign and revision) or arm in commits:
            detail = f"--commit is {value!r}; allowed: the name of an arm, once, '=' and a revision of its repository"
            raise SpecError([SpecProblem(pointer="--commit", detail=detail, hint="--commit baseline=main")])
        commits[arm] = revision
    return commits


def _spec_of(argument: str, commits: Mapping[str, str]) -> "SpecBody":
    from ablate.service.schemas.submissions import SpecBody

    if argument == "-":
        return SpecBody.packed(sys.stdin.buffer.read(), commits=commits)
    path = Path(argument)
    if path.is_file():
        return SpecBody.of(path, commits=commits)
    if argument in catalog_names():
        return SpecBody.packed(read_catalog_file(argument), commits=commits)
    raise SpecError(
        [SpecProblem(pointer="SPEC", detail=no_such_spec(argument), hint=nearest(argument, catalog_names()))]
    )


def no_such_spec(argument: str) -> str:
    """Return the message for an argument that names no spec."""
    return f"there is no file {argument!r} and no catalog spec of that name; catalog: {', '.join(catalog_names())}"


def ablation_id(client: "Client", name: str) -> str:
    """Return the id of the ablation with this name, and print which one it is if a prefix or `latest` chose it.

    Raises NotFound for text that cannot name an ablation.
    """
    if not may_name_an_ablation(name):
        raise NotFound(_not_a_name(name))
    if name == client.ablations.id_of(name):
        return name
    row = client.ablations.find(name)
    if name != row.name:
        err().print(f"[dim]{escape(name)} is {escape(row.name)}, {row.id}[/]")
    return row.id


def _not_a_name(name: str) -> str:
    if Path(name).exists():
        return f"{name!r} is neither a bundle nor the name of an ablation"
    ablation, place = divided_place(name)
    if place and may_name_an_ablation(ablation):
        return f"{name!r} is a place in an ablation, and this command takes the ablation: {ablation}"
    return f"there is no file {name!r}, and names and ids of ablations have only letters, digits, '-' and '_'"


def may_name_an_ablation(name: str) -> bool:
    """Return whether an ablation can have this name or id."""
    return re.fullmatch(CALLED_PATTERN, name) is not None


class _Named(Protocol):
    @property
    def name(self) -> str: ...


NamedRow = TypeVar("NamedRow", bound=_Named)


def rows_named(names: Sequence[str], rows: Sequence[NamedRow], *, unknown: str) -> list[NamedRow]:
    """Return the rows with these names, all rows without names.

    Raises SpecError for every unknown name, with the message `unknown`, in which {!r} stands for the name.
    """
    every = [row.name for row in rows]
    problems = [
        SpecProblem(pointer=name, detail=unknown.format(name), hint=nearest(name, every))
        for name in names
        if name not in every
    ]
    if problems:
        raise SpecError(problems)
    return [row for row in rows if not names or row.name in names]


def node_name(client: "Client", prefix: str) -> str:
    """Return the name of the node with this name or prefix, or `prefix` itself, which the service then rejects.

    Raises Ambiguous for a prefix of several names.
    """
    return _single([row.name for row in client.nodes()], prefix, "nodes") or prefix


def trial_id(client: "Client", name: str) -> str:
    """Return the id of a trial. Raises NotFound or Ambiguous with the possible names."""
    return name if name.startswith("trl_") else trial_at(client, name).id


def trial_at(client: "Client", name: str) -> "TrialPublic":
    """Return the trial at ABLATION/BLOCK/ARM. Without an arm it is the one that runs, or ran last.

    Raises NotFound or Ambiguous with the possible names.
    """
    ablation, _, place = name.partition("/")
    name = ablation_id(client, ablation)
    trial = _latest(trials_at(client, name, place) if place else _trials_of_running_block(client, name))
    if "/" not in place:
        err().print(f"[dim]{block_name(trial.block_index)}, {escape(trial.arm)}, {trial.state}[/]")
    return trial


def trials_at(client: "Client", ablation: str, place: str) -> "list[TrialPublic]":
    """Return the trial at BLOCK/ARM of the ablation with this id, or all trials at BLOCK.

    Raises NotFound or Ambiguous with the possible names.
    """
    number, _, arm = place.partition("/")
    index = block_index(int(number)) if re.fullmatch("[1-9][0-9]{0,8}", number) else -1
    block = _trials_of(client, ablation, index) if index >= 0 else []
    if not block:
        blocks = block_list(range(client.ablations.get(ablation).blocks.planned))
        raise NotFound(f"the ablation has no block {number!r}; blocks: {blocks}")
    arms = [trial.arm for trial in block]
    name = _single(arms, arm, "arms") if arm else None
    if arm and name is None:
        raise NotFound(f"there is no arm {arm!r}; arms: {', '.join(arms)}")
    return [trial for trial in block if name in (None, trial.arm)]


def divided_place(name: str) -> tuple[str, str]:
    """Return ABLATION and BLOCK/ARM or BLOCK of a place; the text itself and nothing of any other."""
    ablation, _, place = name.partition("/")
    return (ablation, place) if re.match("[0-9]", place) else (name, "")


def _trials_of(client: "Client", ablation: str, index: int) -> "list[TrialPublic]":
    """Return the trials of one block, none if it does not exist."""
    trials = client.ablations.trials(ablation, from_block=index)
    return list(takewhile(lambda trial: trial.block_index == index, trials))


def _trials_of_running_block(client: "Client", ablation: str) -> "list[TrialPublic]":
    """Return the trials of the block that computes now, otherwise of the last one that ran."""
    last = 0
    for block in client.ablations.blocks(ablation):
        if block.state is BlockState.RUNNING:
            trials = _trials_of(client, ablation, block.index)
            if any(trial.runs_now for trial in trials):
                return trials
        if block.state in (BlockState.RUNNING, BlockState.DONE, BlockState.FAILED):
            last = block.index
    return _trials_of(client, ablation, last)


def _latest(trials: "list[TrialPublic]") -> "TrialPublic":
    """Return the running trial, otherwise the one that ran last."""
    not_started = (TrialState.QUEUED, TrialState.CANCELLED)
    started = [trial for trial in trials if trial.state not in not_started] or trials[:1]
    return next((trial for trial in started if trial.runs_now), started[-1])


def _single(names: Sequence[str], prefix: str, kind: str) -> str | None:
    """Return the name that equals `prefix`, or the only one that starts with it. Raises Ambiguous for several."""
    matches = [prefix] if prefix in names else [name for name in names if name.startswith(prefix)]
    if len(matches) > 1:
        raise Ambiguous(f"{prefix!r} is a prefix of several {kind}: {', '.join(matches)}")
    return matches[0] if matches else None
