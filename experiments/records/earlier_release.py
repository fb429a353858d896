"""Verify receipts and bundles of release 0.1 by their digests and the signature of the manifest alone.

Their plans, configurations and readings belong to the code of that release, which also judged them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ablate.experiments.digest import digest
from ablate.experiments.errors import SpecProblem
from ablate.experiments.records.bundle import Manifest
from ablate.experiments.records.bundle_files import MANIFEST, RECEIPT
from ablate.experiments.records.signing import manifest_statement, signature_problem

RELEASE = "0.1"
LAST_RECEIPT, LAST_BUNDLE = 3, 3
"""Newest schema versions of that release."""
JUDGED = f"of release {RELEASE}, judged by {RELEASE}: only digests and signatures were checked"


@dataclass(frozen=True, kw_only=True)
class EarlierBundle:
    """A bundle of release 0.1 whose digests and signature fit."""

    key: str | None
    """The key that signed its manifest."""


def is_earlier(version: object, last: int) -> bool:
    """Return whether a schema version is one of release 0.1."""
    return type(version) is int and 1 <= version <= last


def digest_problems(receipt: Mapping[str, Any]) -> list[str]:
    """Say that the digest of a receipt does not fit its content."""
    try:
        expected = digest({name: value for name, value in receipt.items() if name != "digest"})
    except ValueError as error:
        return [f"not a receipt: {error}"]
    if receipt.get("digest") == expected:
        return []
    return [f"was altered: its digest is {receipt.get('digest')}, the content gives {expected}"]


def earlier_problems(manifest: Manifest, files: Mapping[str, bytes]) -> Iterator[SpecProblem]:
    """Find what is wrong with the receipts and the signature of a bundle whose files fit its manifest."""
    for path in sorted(path for path in files if path.endswith(f"/{RECEIPT}")):
        try:
            details = digest_problems(json.loads(files[path]))
        except (AttributeError, TypeError, ValueError) as error:
            details = [f"is no file of a bundle of release {RELEASE}: {error!r}"]
        yield from (SpecProblem(pointer=path, detail=detail) for detail in details)
    if manifest.signature is not None:
        problem = signature_problem(manifest.signature, manifest_statement(manifest.digest))
        if problem is not None:
            yield SpecProblem(pointer=MANIFEST, detail=f"its signature {problem}")
