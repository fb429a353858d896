"""Commands of the embedded stack: up, down, status, backup, restore, demo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from experiments.outcomes import ExitCode
from experiments.reporting import wording
from experiments.reporting.terminal.terminal_table import TerminalTable, names, numbers, texts
from service.cli.output import JsonOption, err, guarded, out, print_json
from service.settings import get_settings
from service.stack import control
from service.stack.layout import StackFiles, home_files
from service.stack.state import PartPhase, StackState

app = typer.Typer()

_FINDINGS_SHOWN = 5
_PHASES = {
    PartPhase.STARTING: "[yellow]starting[/]",
    PartPhase.READY: "[green]runs[/]",
    PartPhase.RESTARTING: "[yellow]starts again[/]",
    PartPhase.GIVEN_UP: "[red]given up[/]",
}


@app.command()
@guarded
def up(
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay attached; Ctrl-C stops everything.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start broker, MLflow, API, background process and one worker on this machine."""
    files = home_files()
    if foreground:
        _up_in_foreground(files)
        return
    state = control.start(files, say)
    if as_json:
        print_json(state)
    else:
        show_addresses(files, state)


@app.command()
@guarded
def down(as_json: JsonOption = False) -> None:
    """Stop the stack of this home and make sure that no process of it is left."""
    files = home_files()
    done = control.stop(files, say)
    if as_json:
        print_json({"was_running": done.was_running, "killed": done.killed, "seconds": round(done.seconds, 2)})
        return
    if not done.was_running:
        out().print(f"nothing runs in {escape(str(files.home))}")
        return
    forced = f"; {wording.counted(done.killed, 'process')} had to be killed" if done.killed else ""
    out().print(f"stopped in {done.seconds:.1f} s, no process is left{forced}")


@app.command()
@guarded
def status(as_json: JsonOption = False) -> None:
    """Show what runs in this home, and what was started again. Exit 6 when nothing runs or a part is not there."""
    files = home_files()
    state = control.running(files)
    if as_json:
        print_json({"running": state is not None, "stack": state})
    elif state is None:
        out().print(f"nothing runs in {escape(str(files.home))}; start it: ablate up")
    else:
        _show_parts(files, state)
    if state is None or not state.is_whole:
        raise typer.Exit(ExitCode.UNMET)


@app.command()
@guarded
def backup(file: Annotated[Path, typer.Argument(help="The new file.")], as_json: JsonOption = False) -> None:
    """Copy the database of this home into a new file, while everything runs."""
    from service.cli.backup import back_up

    size = back_up(get_settings().sqlalchemy_url, file)
    if as_json:
        print_json({"file": str(file.absolute()), "bytes": size})
    else:
        out().print(f"{escape(str(file))}: {size:,} bytes; what MLflow shows is made from it: ablate mlflow rebuild")


@app.command()
@guarded
def restore(
    file: Annotated[Path, typer.Argument(help="What `ablate backup` wrote.")], as_json: JsonOption = False
) -> None:
    """Put a backup in the place of this home's database; the stack must be down."""
    from service.cli.backup import restore as put_back

    kept = put_back(get_settings().sqlalchemy_url, file, home_files())
    if as_json:
        print_json({"kept": None if kept is None else str(kept)})
        return
    if kept is not None:
        out().print(f"the database that was here is now {escape(str(kept))}")
    out().print("restored; next: ablate up    ablate mlflow rebuild")


@app.command()
@guarded
def demo(as_json: JsonOption = False) -> None:
    """Run the catalog ablation `demo` from end to end: stack, live progress, verdict, report, MLflow."""
    from service.cli.demo import run_demo

    summary = run_demo(home_files(), say)
    if as_json:
        print_json(summary)


def say(kind: str, text: str) -> None:
    """Print the progress of a start to standard error."""
    if kind == "part":
        name, _, seconds = text.partition(" ")
        err().print(f"  [green]ready[/]  {name:<11} after {seconds} s")
    elif kind == "note":
        err().print(f"  [yellow]note[/]   {escape(text)}")


def show_addresses(files: StackFiles, state: StackState) -> None:
    """Say where the stack can be reached and what to do next."""
    console = out()
    console.print(f"stack is up in {escape(str(files.home))}")
    _print_addresses(console, f"{state.api_url}/docs", state.ablations_url)
    if state.broker_port is not None:
        where = escape(str(files.broker_password))
        console.print(f"  broker  port {state.broker_port} for workers elsewhere; password in {where}")
    console.print("  next    ablate run demo    ablate status    ablate down")


def _print_addresses(console: Console, api: str, mlflow: str) -> None:
    """Print addresses in one piece each: a terminal that breaks a line itself still knows where an address ends."""
    console.print(f"  API     {api}\n  MLflow  {mlflow}", soft_wrap=True)


def _up_in_foreground(files: StackFiles) -> None:
    from service.stack.parts import check_installed
    from service.stack.supervisor import supervise

    check_installed()
    control.clean_stale(files, say)
    err().print("starting; Ctrl-C stops everything")
    supervise(files, lambda kind, text: _say_in_foreground(files, kind, text))
    err().print("stopped, no process is left")


def _say_in_foreground(files: StackFiles, kind: str, text: str) -> None:
    state = control.running(files) if kind == "ready" else None
    if state is not None:
        show_addresses(files, state)
    else:
        say(kind, text)


def _show_parts(files: StackFiles, state: StackState) -> None:
    console = out()
    console.print(f"stack of {wording.moment(state.started_at)}: {state.phase}")
    _print_addresses(console, state.api_url, state.ablations_url)
    made = TerminalTable(*names("part"), *numbers("pid"), *names("state", "started again"), *texts("log"))
    for name, part in state.parts.items():
        times = wording.counted(part.restarts, "time") if part.restarts else "never"
        made.add_row(name, str(state.pids[name]), _PHASES[part.phase], times, escape(str(files.log(name))))
    console.print(made)
    for finding in state.findings[-_FINDINGS_SHOWN:]:
        said = f"{finding.part} {finding.what}; {finding.then}"
        console.print(f"  {wording.moment(finding.at)}  {escape(said)}")
