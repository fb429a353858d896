"""`ablate sessions`: open, list, show and close sessions, in which `ablate try` proposes changes; get their code."""

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ablate.experiments.design.aa_spec import CONTENT_TYPE
from ablate.experiments.design.load import load_values
from ablate.experiments.design.problems import shown
from ablate.experiments.design.program_files import ARCHIVE, HIDDEN
from ablate.experiments.errors import SpecError, SpecProblem
from ablate.service.cli import completion, tables
from ablate.service.cli.arguments import SpecArgument, read_spec
from ablate.service.cli.output import JsonOption, err, guarded, out, print_json, print_text
from ablate.service.client.api import Client

app = typer.Typer(name="sessions", help="Sessions: many proposals under one error budget.", no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The session's name.", autocompletion=completion.sessions)
]
NewNameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new session.")]


@app.command("open")
@guarded
def open_(name: NewNameArgument, spec: SpecArgument, as_json: JsonOption = False) -> None:
    """Open a session whose incumbent is the baseline of a spec. Nothing runs, and its variants are not proposed."""
    with Client() as client:
        session = client.sessions.open(name, read_spec(spec))
    print_json(session) if as_json else out().print(tables.session(session))


@app.command("list")
@guarded
def list_(as_json: JsonOption = False) -> None:
    """List all sessions, newest first."""
    with Client() as client:
        sessions = client.sessions.list()
    print_json(sessions) if as_json else out().print(tables.sessions(sessions))


@app.command()
@guarded
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show a session with all its proposals, their levels and answers."""
    with Client() as client:
        session = client.sessions.get(name)
    print_json(session) if as_json else out().print(tables.session(session))


@app.command()
@guarded
def spec(
    name: NameArgument,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Compare it with the first baseline: what all kept ones gained together."),
    ] = False,
) -> None:
    """Print the incumbent's spec. Change its variant, and propose the file: ablate try --session NAME -- FILE."""
    with Client() as client:
        session = client.sessions.get(name)
    text = session.whole if whole else session.spec
    if text is None:
        detail = f"session '{name}' has kept no proposal, so its incumbent is the first baseline"
        raise SpecError([SpecProblem(pointer="--whole", detail=detail, hint="leave --whole out")])
    print_text(text)


@app.command()
@guarded
def code(
    name: NameArgument,
    folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="A new or empty folder, for the files of the incumbent.")
    ],
) -> None:
    """Write the incumbent's code, with the changes of all kept proposals, into a folder, and say what it runs."""
    from ablate.experiments.records.code_archive import unpack_code

    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        detail = f"{str(folder)!r} exists, and is no empty folder"
        raise SpecError([SpecProblem(pointer="--out", detail=detail, hint="name a new folder")])
    with Client() as client:
        session = client.sessions.get(name)
        values = load_values(session.spec.encode(), CONTENT_TYPE)
        archive = client.ablations.code(_archive(name, values["workload"].get("code")))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".ablate-code-") as place:
        packed = Path(place, "code.tar.gz")
        packed.write_bytes(archive)
        unpack_code(packed, Path(place, "code"))
        Path(place, "code").rename(folder)  # replaces an empty folder only
    words = [*values["workload"].get("command", ()), *map(str, (values.get("baseline") or {}).get("args") or ())]
    runs = f", which runs: {shlex.join(words)}" if words else ""
    err().print(f"[dim]the code of {tables.incumbent(session)}{escape(runs)}[/]", soft_wrap=True)
    out().print(str(folder), soft_wrap=True)


def _archive(name: str, code: object) -> str:
    """Return the digest of sent code. Raises SpecError for any other code of the incumbent of a session."""
    if isinstance(code, Mapping) and code.get(ARCHIVE) not in (None, HIDDEN):
        return str(code[ARCHIVE])
    if isinstance(code, Mapping) and ARCHIVE in code:
        where, hint = "was sent by somebody else", "ask its sender: ablate share ABLATION --code-with NAME"
    elif code is None:
        where, hint = "is none: it trains a recipe of the node", f"its settings: ablate sessions spec {name}"
    else:
        where, hint = f"is on the node, and was not sent: {shown(code)}", "copy it from there"
    detail = f"the code of the incumbent of session '{name}' {where}"
    raise SpecError([SpecProblem(pointer="NAME", detail=detail, hint=hint)])


@app.command()
@guarded
def close(name: NameArgument, as_json: JsonOption = False) -> None:
    """Close a session. It takes no more proposals; a running one ends by itself."""
    with Client() as client:
        session = client.sessions.close(name)
    print_json(session) if as_json else out().print(tables.session(session))
