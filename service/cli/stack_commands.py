"""Commands of the embedded stack: up, down, status, demo."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ablate.experiments.outcomes import ExitCode
from ablate.experiments.reporting import wording
from ablate.experiments.reporting.terminal.terminal_table import TerminalTable, names, numbers, texts
from ablate.service.cli.output import JsonOption, err, guarded, out, print_json
from ablate.service.stack import control
from ablate.service.stack.layout import StackFiles, home_files
from ablate.service.stack.parts import NO_WORKER
from ablate.service.stack.state import PartPhase, StackState

app = typer.Typer()

_FINDINGS_SHOWN = 5
_CHECKS_S = 10.0
_PHASES = {
    PartPhase.STARTING: "[yellow]starting[/]",
    PartPhase.READY: "[green]runs[/]",
    PartPhase.RESTARTING: "[yellow]restarts[/]",
    PartPhase.GIVEN_UP: "[red]given up[/]",
}


@app.command()
@guarded
def up(
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in the foreground; Ctrl-C stops everything.")
    ] = False,
    no_worker: Annotated[
        bool,
        typer.Option(NO_WORKER, help="Start no worker, so that a worker of another node class can use this machine."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Start broker, MLflow, API, background process and one worker on this machine."""
    files = home_files()
    if foreground:
        _up_in_foreground(files, with_worker=not no_worker)
        return
    state = control.start(files, print_progress, with_worker=not no_worker)
    if as_json:
        print_json(state)
    else:
        print_stack(files, state)


@app.command()
@guarded
def down(as_json: JsonOption = False) -> None:
    """Stop the stack of this home and check that none of its processes is left."""
    files = home_files()
    result = control.stop(files, print_progress)
    workers = control.other_workers(files)
    if as_json:
        own = {"was_running": result.was_running, "killed": result.killed, "seconds": round(result.seconds, 2)}
        print_json({**own, "other_workers": workers})
        return
    forced = f"; {wording.counted(result.killed, 'process')} needed SIGKILL" if result.killed else ""
    left = "no process of the stack is left" if workers else "no process is left"
    stopped = f"stopped in {result.seconds:.1f} s, {left}{forced}"
    out().print(stopped if result.was_running else f"no stack runs in {escape(str(files.home))}")
    for pid in workers:
        out().print(f"process {pid}, a worker that `ablate worker up` started in this home, still runs: kill {pid}")


@app.command()
@guarded
def status(as_json: JsonOption = False) -> None:
    """Show the parts of this home's stack and the failed checks. Exits with 6 if it is down, or if anything fails."""
    files = home_files()
    state = control.running(files)
    degraded = {} if state is None else _failed_checks(state)
    if as_json:
        print_json({"running": state is not None, "stack": state, "degraded": degraded})
    elif state is None:
        out().print(f"nothing runs in {escape(str(files.home))}; start it: ablate up")
    else:
        _show_parts(files, state)
        for name, detail in degraded.items():
            out().print(f"  [red]{escape(name)}[/]  {escape(detail)}")
    if state is None or not state.is_whole or degraded:
        raise typer.Exit(ExitCode.UNMET)


@app.command()
@guarded
def demo(as_json: JsonOption = False) -> None:
    """Run the catalog ablation `demo` from end to end: stack, live progress, verdict, report, MLflow."""
    from ablate.service.cli.demo import run_demo

    summary = run_demo(home_files(), print_progress)
    if as_json:
        print_json(summary)


def print_progress(kind: str, text: str) -> None:
    """Print the progress of a start on standard error."""
    if kind == "part":
        name, _, seconds = text.partition(" ")
        err().print(f"  [green]ready[/]  {name:<11} after {seconds} s")
    elif kind == "note":
        err().print(f"  [yellow]note[/]   {escape(text)}")


def print_stack(files: StackFiles, state: StackState) -> None:
    """Print the addresses of the stack and the next commands."""
    console = out()
    console.print(f"stack is up in {escape(str(files.home))}")
    console.print(f"  pages   {state.api_url}   sign in: ablate open", soft_wrap=True)
    _print_addresses(console, f"{state.api_url}/openapi.json", state.ablations_url)
    if state.broker_port is not None:
        where = escape(str(files.broker_password))
        console.print(f"  broker  port {state.broker_port} for workers on other machines; password in {where}")
    console.print("  next    ablate run demo    ablate status    ablate down")


def _print_addresses(console: Console, api: str, mlflow: str) -> None:
    """Print each address in one line: a terminal that wraps it still recognises the whole address."""
    console.print(f"  API     {api}\n  MLflow  {mlflow}", soft_wrap=True)


def _up_in_foreground(files: StackFiles, *, with_worker: bool) -> None:
    from ablate.service.stack.parts import check_installed
    from ablate.service.stack.supervisor import supervise

    check_installed(with_worker=with_worker)
    control.clean_stale(files, print_progress)
    err().print("starting; Ctrl-C stops everything")
    supervise(files, lambda kind, text: _print_in_foreground(files, kind, text), with_worker=with_worker)
    err().print("stopped, no process is left")


def _print_in_foreground(files: StackFiles, kind: str, text: str) -> None:
    state = control.running(files) if kind == "ready" else None
    if state is not None:
        print_stack(files, state)
    else:
        print_progress(kind, text)


def _failed_checks(state: StackState) -> dict[str, str]:
    """Return the failed checks of the API by name, with their reasons."""
    import httpx

    from ablate.experiments.system.http_clients import http_client, reason

    try:
        with http_client(state.api_url, timeout=_CHECKS_S) as client:
            answer = client.get("/readyz").json()
    except (httpx.HTTPError, ValueError) as error:
        return {"api": reason(error, state.api_url)}
    if "checks" not in answer:  # a problem document: the database cannot be read
        return {"api": str(answer.get("detail"))}
    return {name: check["detail"] for name, check in answer["checks"].items() if not check["ok"]}


def _show_parts(files: StackFiles, state: StackState) -> None:
    console = out()
    console.print(f"stack of {wording.moment(state.started_at)}: {state.phase}")
    _print_addresses(console, state.api_url, state.ablations_url)
    table = TerminalTable(*names("part"), *numbers("pid"), *names("state", "restarted"), *texts("log"))
    for name, part in state.parts.items():
        times = wording.counted(part.restarts, "time") if part.restarts else "never"
        table.add_row(name, str(state.pids[name]), _PHASES[part.phase], times, escape(str(files.log(name))))
    console.print(table)
    for finding in state.findings[-_FINDINGS_SHOWN:]:
        text = escape(f"{finding.part} {finding.what}; {finding.then}")
        console.print(f"  {wording.moment(finding.at)}  {text}")
