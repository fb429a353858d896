"""`ablate offline verify`: verify receipts and bundles here."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from ablate.experiments.block_numbers import block_list
from ablate.experiments.errors import BundleError, ReceiptError
from ablate.experiments.outcomes import ExitCode
from ablate.experiments.records.bundle import Bundle
from ablate.experiments.records.bundle_files import MANIFEST, RECEIPT, is_bundle, read_bundle_files
from ablate.experiments.records.bundle_reader import verify_bundle
from ablate.experiments.records.earlier_release import JUDGED, LAST_RECEIPT, EarlierBundle, is_earlier
from ablate.experiments.records.receipt_check import verify_signed
from ablate.experiments.reporting import wording
from ablate.service.cli import completion
from ablate.service.cli.commands.offline.receipts import fetch, read_receipts
from ablate.service.cli.output import JsonOption, err, guarded, out, print_json
from ablate.service.client.api import Client, ClientError
from ablate.service.errors import ServiceError

app = typer.Typer()

_NOBODY = "nobody"
_NOT_SIGNED = "is not signed"


@app.command()
@guarded
def verify(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...",
            help="A bundle, or a JSON file with one receipt or a list of receipts: no service needed. Or an ablation "
            "or a trial, as in `ablate offline receipts`.",
            autocompletion=completion.trials,
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="Accept signatures by this key only. Repeat it for more keys."),
    ] = None,
    signed: Annotated[bool, typer.Option("--signed", help="Also fail if a bundle or receipt is not signed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Recompute digests, signatures and statistics from raw samples, and show who signed. Exits with 6 on problems."""
    results = [_check(subject, frozenset(key or ()), signed=signed) for subject in subjects]
    checks = [check for result in results for check in result.checks]
    if as_json:
        rows = [{"receipt": check.name, "problems": check.problems} for check in checks]
        print_json({"receipts": rows, "unsigned": [name for result in results for name in result.unsigned]})
    else:
        for result in results:
            _print_unsigned(result.unsigned)
        _print(checks)
        for signer in (signer for result in results for signer in result.signers):
            err().print(escape(signer))
    if any(check.problems for check in checks):
        raise typer.Exit(ExitCode.UNMET)


class _Check(NamedTuple):
    """The problems of one receipt, or of one file of a bundle."""

    name: str
    problems: list[str]
    signer: str | None = None
    """Key and node of a receipt's own signature. None in a bundle, which has its own, and for a damaged receipt."""


class _Result(NamedTuple):
    """The checks of one argument of the command."""

    checks: list[_Check]
    signers: list[str]
    """A line for each."""
    unsigned: list[str]
    """Names of receipts and manifests that are not signed."""


def _print_unsigned(names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        detail = "anybody who had these files could have written, changed or left out their contents"
        out().print(f"[yellow]UNSIGNED[/]  {escape(names[0])}{more}: {detail}")


def _print(checks: list[_Check]) -> None:
    for check in checks:
        out().print(f"{'[red]DAMAGED[/]' if check.problems else '[green]good[/]'}  {escape(check.name)}")
        for problem in check.problems:
            out().print(f"    {escape(problem)}")
    damaged = sum(bool(check.problems) for check in checks)
    if len(checks) > 1:
        out().print(f"{len(checks):,} checked: {f'{damaged:,} damaged' if damaged else 'no problems'}")


def _check(subject: str, keys: frozenset[str], *, signed: bool) -> _Result:
    """Check a file, a bundle, or the receipts of an ablation or trial.

    With `keys`, one of them must have signed every receipt; with `signed`, anybody. Raises ReceiptError, OSError.
    """
    path = Path(subject)
    if is_bundle(path):
        return _check_bundle(path, keys, signed=signed)
    receipts = read_receipts(path) if path.exists() else _fetch_all(subject)
    checks = [_check_receipt(name, receipt, keys, signed=signed) for name, receipt in receipts]
    signers = Counter(check.signer for check in checks if check.signer is not None)
    lines = [f"{wording.counted(count, 'receipt')}: signed by {signer}" for signer, count in signers.items()]
    unsigned = [check.name for check in checks if check.signer is not None and check.signer.startswith(_NOBODY)]
    return _Result(checks, lines, unsigned)


def _fetch_all(name: str) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        with Client() as client:
            answer = fetch(client, name)
    except (ClientError, ServiceError) as error:
        raise ReceiptError(f"there is no file {name!r}; as an ablation or a trial: {error}") from error
    receipts = answer if isinstance(answer, dict) else {name: answer}
    if not receipts:
        raise ReceiptError(f"{name!r} has no receipt yet")
    return [(key, receipt.model_dump(mode="json")) for key, receipt in receipts.items()]


def _check_receipt(name: str, receipt: Mapping[str, Any], keys: frozenset[str], *, signed: bool) -> _Check:
    problems, signature = verify_signed(receipt, any_release=True)
    if problems:
        return _Check(name, problems)
    key = None if signature is None else signature.by.key
    signer = _NOBODY if signature is None else f"{key} of {signature.node}"
    if is_earlier(receipt["schema_version"], LAST_RECEIPT):
        signer += f", {JUDGED}"
    wrong = [_wrong_key(key or _NOBODY)] if keys and key not in keys else []
    return _Check(name, wrong or ([_NOT_SIGNED] if signed and key is None else []), signer)


def _check_bundle(path: Path, keys: frozenset[str], *, signed: bool) -> _Result:
    files = read_bundle_files(path)
    try:
        bundle = verify_bundle(files)
    except BundleError as error:
        damaged = {problem.pointer for problem in error.problems}
        problems = {
            name: [p.detail for p in error.problems if p.pointer == name] for name in sorted({*files, *damaged})
        }
        signers, unsigned = [], []
    else:
        problems = {name: [] for name in files} | {MANIFEST: list(_key_problems(bundle, keys, signed=signed))}
        unsigned = [] if _keys_of(bundle) else [f"{path}/{MANIFEST}"]
        if isinstance(bundle, EarlierBundle):
            signers = [f"a bundle {JUDGED}; signed by {bundle.key or _NOBODY}"]
        else:
            signers = [
                f"blocks {block_list(s.blocks)} of {s.name}: signed by {s.key or _NOBODY}" for s in bundle.signers
            ]
    checks = [
        _Check(f"{path}/{name}", own_problems)
        for name, own_problems in problems.items()
        if own_problems or name.endswith(RECEIPT)
    ]
    return _Result(checks, signers, unsigned)


def _key_problems(bundle: Bundle | EarlierBundle, keys: frozenset[str], *, signed: bool) -> Iterator[str]:
    """Yield how a valid bundle fails the requirement that `keys`, or anybody, signed it as a whole."""
    if not keys and not signed:
        return
    own = _keys_of(bundle)
    for key in sorted(own - keys) if keys else ():
        yield _wrong_key(key)
    if not own:
        yield _NOT_SIGNED


def _keys_of(bundle: Bundle | EarlierBundle) -> frozenset[str]:
    """Return the key that signed a bundle; none without a signature."""
    if isinstance(bundle, EarlierBundle):
        return frozenset(filter(None, [bundle.key]))
    return bundle.keys


def _wrong_key(signer: str) -> str:
    return f"is signed by {signer}, which is none of the given keys"
