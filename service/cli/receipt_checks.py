"""Receipts and bundles, verified here whoever gives them: what is wrong with each, and who signed them."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.block_numbers import block_list, block_number
from experiments.errors import BundleError, ReceiptError
from experiments.records.bundle import Bundle
from experiments.records.bundle_files import read_bundle_files
from experiments.records.bundle_paths import MANIFEST, RECEIPT, is_bundle
from experiments.records.bundle_reader import open_bundle
from experiments.records.signed_receipt import SignedReceipt, verify_signed
from experiments.reporting import wording
from service.cli.names import ablation_id, trial_id
from service.client.api import Client, ClientError
from service.errors import ServiceError

NOBODY = "nobody"


class Examined(NamedTuple):
    """One receipt, or one file of a bundle."""

    name: str
    problems: list[str]
    signer: str | None = None
    """Key and node of a receipt's own signature; None where its bundle says it, or nothing could be read."""


def examine(subject: str, keys: frozenset[str]) -> tuple[list[Examined], list[str]]:
    """Return what was found in a file, a bundle, or the receipts of an ablation or trial of that name, and who signed.

    `keys`: all must be signed by one of these, if there are any. Raises ReceiptError, OSError.
    """
    path = Path(subject)
    if is_bundle(path):
        return _of_bundle(path, keys)
    receipts = _read(path) if path.exists() else _fetched(subject)
    found = [_of_receipt(name, receipt, keys) for name, receipt in receipts]
    signers = Counter(one.signer for one in found if one.signer is not None)
    return found, [f"{wording.counted(count, 'receipt')}: signed by {who}" for who, count in signers.items()]


def receipts_of(client: Client, called: str) -> SignedReceipt | dict[str, SignedReceipt]:
    """Return a trial's receipt, or those of an ablation under ABLATION/BLOCK/ARM."""
    if called.startswith("trl_") or "/" in called:
        return client.trials.receipt(trial_id(client, called))
    ablation = ablation_id(client, called)
    measured = [trial for trial in client.ablations.trials(ablation) if trial.receipt_digest]
    return {
        f"{called}/{block_number(trial.block_index)}/{trial.arm}": client.trials.receipt(trial.id) for trial in measured
    }


def _fetched(called: str) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        with Client() as client:
            found = receipts_of(client, called)
    except (ClientError, ServiceError) as error:
        raise ReceiptError(f"{called!r} is no file here; as an ablation or a trial: {error}") from error
    if not isinstance(found, dict):
        return [(called, found.model_dump(mode="json"))]
    if not found:
        raise ReceiptError(f"{called!r} has no receipt yet")
    return [(name, receipt.model_dump(mode="json")) for name, receipt in found.items()]


def _read(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
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


def _of_receipt(name: str, receipt: Mapping[str, Any], keys: frozenset[str]) -> Examined:
    problems, signature = verify_signed(receipt)
    if problems:
        return Examined(name, problems)
    key = None if signature is None else signature.by.key
    who = NOBODY if signature is None else f"{key} of {signature.node}"
    if not keys or key in keys:
        return Examined(name, [], who)
    return Examined(name, [f"is signed by {key or NOBODY}, which is none of the keys that were given"], who)


def _of_bundle(path: Path, keys: frozenset[str]) -> tuple[list[Examined], list[str]]:
    files = read_bundle_files(path)
    try:
        bundle = open_bundle(files)
    except BundleError as error:
        damaged = {problem.pointer for problem in error.problems}
        found = {name: [p.detail for p in error.problems if p.pointer == name] for name in sorted({*files, *damaged})}
        signers = []
    else:
        found = {name: [] for name in files} | {MANIFEST: list(_strange(bundle, keys))}
        signers = [f"blocks {block_list(s.blocks)} of {s.name}: signed by {s.key or NOBODY}" for s in bundle.signers]
    shown = [Examined(f"{path}/{name}", own) for name, own in found.items() if own or name.endswith(RECEIPT)]
    return shown, signers


def _strange(bundle: Bundle, keys: frozenset[str]) -> Iterator[str]:
    """Yield in what way a good bundle is not signed by `keys`, where any are given."""
    if not keys:
        return
    for key in sorted(bundle.keys - keys):
        yield f"is signed by {key}, which is none of the keys that were given"
    if bundle.unsigned:
        yield f"is not signed whole: {', '.join(bundle.unsigned)}"
