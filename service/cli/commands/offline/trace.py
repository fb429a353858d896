"""`ablate offline trace`: a profiled step over time, for trace viewers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ablate.experiments.errors import ReceiptError
from ablate.model.measurements import StepTrace
from ablate.service.cli import completion
from ablate.service.cli.arguments import trial_id
from ablate.service.cli.commands.offline.receipts import read_receipts
from ablate.service.cli.output import guarded, out, print_text
from ablate.service.client.api import Client

app = typer.Typer()


@app.command()
@guarded
def trace(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="TRIAL",
            help="A trial of the first block, such as latest/1/baseline, or a JSON file with its receipt.",
            autocompletion=completion.trials,
        ),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")] = None,
) -> None:
    """Write the profiled step of a trial over time, in the format of ui.perfetto.dev and chrome://tracing."""
    from ablate.experiments.reporting.step_traces import chrome_trace

    path = Path(subject)
    if path.is_file():
        ((_name, receipt),) = _one(read_receipts(path), subject)
    else:
        with Client() as client:
            receipt = client.trials.receipt(trial_id(client, subject)).model_dump(mode="json")
    if receipt.get("step_trace") is None:
        raise ReceiptError(
            f"{subject!r} has no profiled step over time; trials of the first block have one if the spec has "
            "workload.profile: true"
        )
    text = chrome_trace(
        f"{receipt['ids']['ablation']}: {receipt['arm']}", StepTrace.model_validate(receipt["step_trace"])
    )
    if output is None:
        print_text(text + "\n")
        return
    output.write_text(text, encoding="utf-8")
    out().print(str(output))


def _one(receipts: list[tuple[str, Mapping[str, Any]]], subject: str) -> list[tuple[str, Mapping[str, Any]]]:
    if len(receipts) != 1:
        raise ReceiptError(f"{subject!r} has {len(receipts):,} receipts; a trace is that of one")
    return receipts
