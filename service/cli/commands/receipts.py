"""`ablate receipts`: fetch receipts, and verify them without a service."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from experiments.block_numbers import block_list
from experiments.errors import BundleError, ReceiptError
from experiments.outcomes import ExitCode
from experiments.records.bundle import MANIFEST, RECEIPT, Bundle
from experiments.records.bundle_files import is_bundle, read_bundle_files
from experiments.records.bundle_reader import open_bundle
from experiments.records.signed_receipt import SignedReceipt, verify_signed
from service.cli import completion
from service.cli.names import ablation_id, trial_id
from service.cli.output import JsonOption, err, guarded, out, print_json
from service.client import Client

app = typer.Typer(name="receipts", help="Fetch receipts and verify them offline.", no_args_is_help=True)


@app.command("verify")
@guarded
def verify_(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="JSON: one receipt, or a list of them; or a bundle.")
    ],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="All must be signed by this key, or another that is given."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute digests, signatures and statistics from raw samples; say who signed. Exit 6 unless all is good."""
    findings = {name: found for path in files for name, found in _examine(path, frozenset(key or ()))}
    if as_json:
        print_json({"receipts": [{"receipt": name, "problems": found} for name, found in findings.items()]})
    else:
        for name, found in findings.items():
            out().print(f"{'[red]DAMAGED[/]' if found else '[green]good[/]'}  {escape(name)}")
            for problem in found:
                out().print(f"    {escape(problem)}")
    if any(findings.values()):
        raise typer.Exit(ExitCode.UNMET)


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
        is_trial = subject.startswith("trl_") or "/" in subject
        found = (
            client.trials.receipt(trial_id(client, subject))
            if is_trial
            else _of_ablation(client, ablation_id(client, subject))
        )
    if output is None:
        print_json(found)
        return
    plain = [one.model_dump(mode="json") for one in (found if isinstance(found, list) else [found])]
    output.write_text(
        json.dumps(plain if isinstance(found, list) else plain[0], indent=2, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    out().print(str(output))


def _of_ablation(client: Client, ablation: str) -> list[SignedReceipt]:
    return [client.trials.receipt(trial.id) for trial in client.ablations.trials(ablation) if trial.receipt_digest]


def _examine(path: Path, keys: frozenset[str]) -> list[tuple[str, list[str]]]:
    """Return what is wrong with every receipt in a file, or with every file of a bundle, under names to show."""
    if not is_bundle(path):
        return [(name, _receipt_problems(name, receipt, keys)) for name, receipt in _load(path)]
    files = read_bundle_files(path)
    try:
        signatures = _signatures(open_bundle(files), keys)
    except BundleError as error:
        damaged = {problem.pointer for problem in error.problems}
        found = {name: [p.detail for p in error.problems if p.pointer == name] for name in sorted({*files, *damaged})}
    else:
        found = {name: [] for name in files} | {MANIFEST: signatures}
    return [(f"{path}/{name}", details) for name, details in found.items() if details or name.endswith(RECEIPT)]


def _receipt_problems(name: str, receipt: Mapping[str, Any], keys: frozenset[str]) -> list[str]:
    """Say by whom a good receipt is signed; return what is wrong with it, and whether that is none of `keys`."""
    problems, signature = verify_signed(receipt)
    if problems:
        return problems
    key = None if signature is None else signature.by.key
    who = "[yellow]nobody[/]" if signature is None else f"{key} of {escape(signature.node)}"
    err().print(f"{escape(name)}: signed by {who}")
    if not keys or key in keys:
        return []
    return [f"is signed by {key or 'nobody'}, which is none of the keys that were given"]


def _signatures(bundle: Bundle, keys: frozenset[str]) -> list[str]:
    """Say by whom a good bundle is signed; return in what way that is not by `keys`, where any are given."""
    for signer in bundle.signers:
        who = signer.key or "[yellow]nobody[/]"
        err().print(f"blocks {block_list(signer.blocks)} of {escape(signer.name)}: signed by {who}")
    if not keys:
        return []
    strange = [f"is signed by {key}, which is none of the keys that were given" for key in sorted(bundle.keys - keys)]
    return strange + ([f"is not signed whole: {', '.join(bundle.unsigned)}"] if bundle.unsigned else [])


def _load(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the receipts in a file with names to show."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReceiptError(f"{path} is not JSON: {error}") from error
    if isinstance(content, dict):
        return [(str(path), content)]
    if isinstance(content, list) and content and all(isinstance(item, dict) for item in content):
        return [(f"{path}[{index}]", item) for index, item in enumerate(content)]
    raise ReceiptError(f"{path} holds neither a receipt nor a list of receipts")
