"""Commands that talk to a service: plan, submit, watch, review."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.analysis.verdicts import VariantVerdict
from experiments.design.gate import GatePublic
from experiments.design.gates import catalogue
from experiments.design.problems import nearest
from experiments.design.spec import ablation_json_schema
from experiments.errors import SpecError, SpecProblem
from experiments.outcomes import EXIT_CODES, AblationState, Decision, ExitCode
from experiments.reporting.pull_request import pull_request_markdown
from service.cli import (
    aa,
    bundles,
    calibration_files,
    completion,
    gates_page,
    history,
    init,
    keys,
    nodes,
    open_page,
    priority,
    published,
    rebuild,
    receipts,
    show,
    tokens,
)
from service.cli.calibration_files import CalibrationOption, read_calibrations
from service.cli.names import AblationArgument, JudgedArgument, TrialArgument, ablation_id, trial_id
from service.cli.output import JsonOption, StreamOption, guarded, out, print_json, print_text
from service.cli.spec_argument import SpecArgument, read_spec
from service.cli.submitting import announce, follow_to_end, run_spec
from service.client import Client
from service.stack.layout import home_files

app = typer.Typer()
app.add_typer(bundles.app)
app.add_typer(aa.app)
app.add_typer(calibration_files.app)
app.add_typer(published.app)
app.add_typer(receipts.app, name="receipts")
app.add_typer(keys.app, name="keys")
app.add_typer(nodes.app, name="nodes")
app.add_typer(tokens.app, name="tokens")
app.add_typer(history.app)
app.add_typer(rebuild.app, name="mlflow")
app.add_typer(init.app)
app.add_typer(priority.app)
app.add_typer(open_page.app)

KeyOption = Annotated[
    str | None, typer.Option(help="The same key with the same spec is the same ablation; default: a new one.")
]
RequireOption = Annotated[Decision | None, typer.Option(help="Exit with 0 only when every variant has this decision.")]


@app.command()
@guarded
def plan(
    spec: SpecArgument,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write a plan file for `ablate exec` instead; needs no service.")
    ] = None,
    calibration: CalibrationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a spec would run, on which nodes and what it could detect. Nothing is stored."""
    if out_file is not None:
        bundles.write_plan(read_spec(spec), out_file, known=read_calibrations(calibration), as_json=as_json)
        return
    bundles.only_offline(calibration)
    with Client() as client:
        answer = client.ablations.plan(read_spec(spec))
    print_json(answer) if as_json else out().print(show.plan(answer))


@app.command()
@guarded
def submit(
    spec: SpecArgument,
    idempotency_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a spec and return at once."""
    with Client() as client:
        answer = client.ablations.submit(read_spec(spec), idempotency_key=idempotency_key)
    if as_json:
        print_json(answer)
    else:
        announce(out(), answer)


@app.command()
@guarded
def run(
    spec: SpecArgument,
    require: RequireOption = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the verdict for a pull request, too.")
    ] = None,
    idempotency_key: KeyOption = None,
    as_json: StreamOption = False,
) -> None:
    """Submit a spec, watch it and show the verdict. Ctrl-C detaches (exit code 130) and cancels nothing.

    Exit code: 0 when there is a verdict; with --require as `ablate verdict` with it.
    """
    verdict = run_spec(read_spec(spec), idempotency_key=idempotency_key, as_json=as_json)
    if markdown is not None:
        markdown.write_text(pull_request_markdown(verdict, require) + "\n", encoding="utf-8")
    if require is not None:
        raise typer.Exit(exit_code(verdict.variants, require))


@app.command()
@guarded
def watch(ablation: AblationArgument, as_json: StreamOption = False) -> None:
    """Follow an ablation to its end. Ctrl-C detaches (exit code 130) and cancels nothing."""
    with Client() as client:
        follow_to_end(client, ablation_id(client, ablation), as_json=as_json)


@app.command("list")
@guarded
def list_(
    state: Annotated[AblationState | None, typer.Option(help="Only ablations in this state.")] = None,
    label: Annotated[str | None, typer.Option(help="Only with this label, written key=value.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many, newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List ablations, newest first."""
    with Client() as client:
        found = client.ablations.list(state=state, label=label)
        rows = [row for row, _ in zip(found, range(limit), strict=False)]
    print_json(rows) if as_json else out().print(show.ablations(rows))


@app.command("show")
@guarded
def show_(ablation: AblationArgument, as_json: JsonOption = False) -> None:
    """Show one ablation and its trials."""
    with Client() as client:
        found = ablation_id(client, ablation)
        row, trials = client.ablations.get(found), list(client.ablations.trials(found))
    if as_json:
        print_json({"ablation": row, "trials": trials})
    else:
        out().print(show.ablation(row, trials))


@app.command()
@guarded
def cancel(ablation: AblationArgument, as_json: JsonOption = False) -> None:
    """End an ablation. What it measured until now is kept."""
    with Client() as client:
        row = client.ablations.cancel(ablation_id(client, ablation))
    print_json(row) if as_json else out().print(f"{escape(row.name)} ({row.id}) is {show.state(row.state)}")


@app.command()
@guarded
def verdict(
    ablation: JudgedArgument,
    calibration: CalibrationOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why, with every requirement of the rule.")] = False,
    require: RequireOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the verdict. Exit code: 0 adopt, 1 reject, 2 same, 3 inconclusive, 4 invalid, 5 error.

    With several variants it is 0 when one can be adopted, otherwise the highest of their codes. With --require it is 0
    when every variant has that decision, otherwise the highest code of the others; 6 where they are all to be adopted.
    """
    found = bundles.verdict_of(ablation, read_calibrations(calibration))
    if as_json:
        print_json(found)
    elif markdown:
        print_text(pull_request_markdown(found, require) + "\n")
    else:
        console = out()
        console.print(show.verdict(found))
        for line in show.explanation(found) if explain else ():
            console.print(line)
    raise typer.Exit(exit_code(found.variants, require))


def exit_code(variants: tuple[VariantVerdict, ...], require: Decision | None) -> ExitCode:
    """Return the exit code of `verdict`."""
    decisions = [variant.decision for variant in variants]
    if require is not None:
        others = [EXIT_CODES[decision] for decision in decisions if decision is not require]
        return (max(others) or ExitCode.UNMET) if others else ExitCode.DONE
    if Decision.ADOPT in decisions:
        return ExitCode.DONE
    return max((EXIT_CODES[decision] for decision in decisions), default=ExitCode.ERROR)


@app.command()
@guarded
def report(
    ablation: JudgedArgument,
    output: Annotated[
        str | None, typer.Option("--output", "--out", "-o", help="File, or - for standard output.")
    ] = None,
    calibration: CalibrationOption = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Save the report: one HTML page that needs nothing else. Default: $ABLATE_HOME/reports/<id>.html."""
    name, page = bundles.report_of(ablation, read_calibrations(calibration))
    if output == "-":
        print_text(page + "\n")
        return
    path = home_files().save_report(name, page, Path(output) if output else None)
    print_json({"path": str(path)}) if as_json else out().print(str(path))
    if open_:
        webbrowser.open(path.as_uri())


@app.command()
@guarded
def log(
    trial: TrialArgument,
    offset: Annotated[int, typer.Option(min=0, help="Start at this byte.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Print a trial's log as far as it has come."""
    with Client() as client:
        text, end = client.trials.log(trial_id(client, trial), offset=offset)
    print_json({"text": text, "end": end}) if as_json else print_text(text)


@app.command()
@guarded
def gates(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GATE]...", help="Only these.", autocompletion=completion.gates),
    ] = None,
    as_json: JsonOption = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print this program's gates as docs/gates.md.")] = False,
) -> None:
    """Show what can be switched: values, defaults, claims."""
    if markdown:
        typer.echo(gates_page.render(catalogue()), nl=False)
        return
    with Client() as client:
        rows = chosen_gates(client.gates(), names or ())
    print_json(rows) if as_json else out().print(show.gates(rows))


def chosen_gates(rows: Sequence[GatePublic], names: Sequence[str]) -> list[GatePublic]:
    """Return the gates of these names, all without any. Raises SpecError with what is meant for one that is none."""
    known = [row.name for row in rows]
    wrong = [
        SpecProblem(pointer=name, detail=f"unknown gate {name!r}", hint=nearest(name, known))
        for name in names
        if name not in known
    ]
    if wrong:
        raise SpecError(wrong)
    return [row for row in rows if not names or row.name in names]


@app.command()
@guarded
def schema(as_json: JsonOption = True) -> None:
    """Print the JSON Schema of a spec, for editors. It is JSON with and without --json."""
    print_json(ablation_json_schema())
