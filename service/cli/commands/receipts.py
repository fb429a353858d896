"""`ablate receipts`: fetch receipts, and verify them here."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.outcomes import ExitCode
from experiments.reporting import wording
from service.cli import completion
from service.cli.output import JsonOption, err, guarded, out, print_json
from service.cli.receipt_checks import Examined, examine, receipts_of
from service.client.api import Client

app = typer.Typer(name="receipts", help="Fetch receipts and verify them here.", no_args_is_help=True)


@app.command("verify")
@guarded
def verify_(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...",
            help="A bundle, or a JSON file of one receipt or a list: these need no service. Or an ablation or a trial, "
            "called as in `get`.",
            autocompletion=completion.trials,
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="All must be signed by this key, or another that is given."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute digests, signatures and statistics from raw samples; say who signed. Exit 6 unless all is good."""
    looks = [examine(subject, frozenset(key or ())) for subject in subjects]
    found = [one for look, _ in looks for one in look]
    if as_json:
        print_json({"receipts": [{"receipt": one.name, "problems": one.problems} for one in found]})
    else:
        _show(found)
        for signer in (signer for _, signers in looks for signer in signers):
            err().print(escape(signer))
    if any(one.problems for one in found):
        raise typer.Exit(ExitCode.UNMET)


def _show(found: list[Examined]) -> None:
    for one in found:
        out().print(f"{'[red]DAMAGED[/]' if one.problems else '[green]good[/]'}  {escape(one.name)}")
        for problem in one.problems:
            out().print(f"    {escape(problem)}")
    damaged = sum(bool(one.problems) for one in found)
    if len(found) > 1:
        out().print(f"{len(found):,} looked at: {f'{damaged:,} damaged' if damaged else 'nothing is wrong'}")


@app.command()
@guarded
def get(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A trial, as in `ablate log`, or an ablation; `latest`, names and beginnings will do.",
            autocompletion=completion.trials,
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")] = None,
    as_json: JsonOption = True,
) -> None:
    """Fetch one trial's receipt, or all receipts of an ablation as a list. Always JSON."""
    with Client() as client:
        found = receipts_of(client, subject)
    shown = list(found.values()) if isinstance(found, dict) else found
    if output is None:
        print_json(shown)
        return
    plain = [one.model_dump(mode="json") for one in shown] if isinstance(shown, list) else shown.model_dump(mode="json")
    output.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    count = len(shown) if isinstance(shown, list) else 1
    err().print(f"[dim]{wording.counted(count, 'receipt')}[/]")
    out().print(str(output))
