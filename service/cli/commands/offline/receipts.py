"""`ablate offline receipts`: fetch receipts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ablate.experiments.block_numbers import block_number
from ablate.experiments.errors import ReceiptError
from ablate.experiments.records.receipt_check import SignedReceipt
from ablate.experiments.reporting import wording
from ablate.service.cli import completion
from ablate.service.cli.arguments import ablation_id, trial_id
from ablate.service.cli.output import JsonOption, err, guarded, out, print_json
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def receipts(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A trial, as in `ablate log`, or an ablation: its id, its name, a unique prefix, or `latest`.",
            autocompletion=completion.trials,
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
    as_json: JsonOption = True,
) -> None:
    """Fetch the receipt of a trial, or all receipts of an ablation as a list. The output is always JSON."""
    with Client() as client:
        answer = fetch(client, subject)
    fetched = list(answer.values()) if isinstance(answer, dict) else answer
    if output is None:
        print_json(fetched)
        return
    every = fetched if isinstance(fetched, list) else [fetched]
    values = [receipt.model_dump(mode="json") for receipt in every]
    content = values if isinstance(fetched, list) else values[0]
    output.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    err().print(f"[dim]{wording.counted(len(every), 'receipt')}[/]")
    out().print(str(output))


def fetch(client: Client, name: str) -> SignedReceipt | dict[str, SignedReceipt]:
    """Return the receipt of a trial, or the receipts of an ablation by ABLATION/BLOCK/ARM."""
    if name.startswith("trl_") or "/" in name:
        return client.trials.receipt(trial_id(client, name))
    trials = [trial for trial in client.ablations.trials(ablation_id(client, name)) if trial.receipt_digest]
    return {
        f"{name}/{block_number(trial.block_index)}/{trial.arm}": client.trials.receipt(trial.id) for trial in trials
    }


def read_receipts(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return (name, receipt) for the receipts in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReceiptError(f"{path} is not JSON: {error}") from error
    if isinstance(content, dict):
        return [(str(path), content)]
    if isinstance(content, list) and content and all(isinstance(item, dict) for item in content):
        return [(f"{path}[{index}]", item) for index, item in enumerate(content)]
    raise ReceiptError(f"{path} is neither a receipt nor a list of receipts")
