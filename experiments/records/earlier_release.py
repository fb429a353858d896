"""Verify receipts and bundles of release 0.1 by their digests and signatures alone.

Their plans, configurations and readings belong to the code of that release, which also judged them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ablate.experiments.digest import digest
from ablate.experiments.errors import SpecProblem
from ablate.experiments.records.bundle import Attempt, Manifest
from ablate.experiments.records.bundle_files import MANIFEST, PLAN, RECEIPT
from ablate.experiments.records.signing import Signature, block_statement, manifest_statement, signature_problem

RELEASE = "0.1"
LAST_RECEIPT, LAST_BUNDLE = 3, 2
"""Newest schema versions of that release."""
JUDGED = f"of release {RELEASE}, judged by {RELEASE}: only digests and signatures were checked"


@dataclass(frozen=True, kw_only=True)
class EarlierBundle:
    """A bundle of release 0.1 whose digests and signatures fit."""

    keys: frozenset[str]
    """Keys of all signatures in it."""
    unsigned: tuple[str, ...]
    """Files without a signature that they could have."""


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


def check_earlier(manifest: Manifest, files: Mapping[str, bytes]) -> tuple[list[SpecProblem], EarlierBundle]:
    """Check receipts and signatures of a bundle whose files fit its manifest; return what is wrong, and who signed."""
    reader = _Reader(manifest, files)
    problems = list(reader.problems())
    return problems, EarlierBundle(keys=frozenset(reader.keys), unsigned=tuple(reader.unsigned))


class _Reader:
    """Reads the signed records of a bundle as plain JSON."""

    def __init__(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        self._manifest, self._files = manifest, files
        self.keys: set[str] = set()
        self.unsigned: list[str] = []

    def problems(self) -> Iterator[SpecProblem]:
        """Yield damaged receipts, and signatures that do not fit or are by no node of the bundle."""
        checks = {path: self._receipt for path in self._files if path.endswith(f"/{RECEIPT}")}
        records = (path for path in self._files if path.endswith("/block.json") or path.startswith("attempts/"))
        checks |= dict.fromkeys(records, self._record)
        for path, check in {**dict(sorted(checks.items())), MANIFEST: self._whole}.items():
            try:
                detail = check(path)
            except (LookupError, TypeError, ValueError) as error:
                detail = f"is no file of a bundle of release {RELEASE}: {error!r}"
            if detail is not None:
                yield SpecProblem(pointer=path, detail=detail)

    def _receipt(self, path: str) -> str | None:
        return next(iter(digest_problems(self._json(path))), None)

    def _whole(self, _path: str) -> str | None:
        signature = self._manifest.signature
        values = None if signature is None else signature.model_dump()
        return self._signed(MANIFEST, values, manifest_statement(self._manifest.digest))

    def _record(self, path: str) -> str | None:
        record = self._json(path)
        block = self._json(PLAN)["blocks"][record["index"]]["block_id"]
        ids = {"ablation": self._manifest.ablation_id, "block": block, "attempt": record["attempt_id"]}
        broke = {name: value for name, value in record.items() if name not in Attempt.model_fields}
        signature = record.get("signature")
        number = record["attempt_no"] if signature and "version" in signature else None
        return self._signed(path, signature, block_statement(ids, self._receipts(path), broke or None, number=number))

    def _receipts(self, path: str) -> list[str]:
        """Return the digests of a block's receipts in running order, the order of their folders."""
        folder = path.rpartition("/")[0]
        if folder == "attempts":
            return []
        paths = (one for one in self._files if one.startswith(f"{folder}/") and one.endswith(f"/{RECEIPT}"))
        return [self._json(one)["digest"] for one in sorted(paths)]

    def _signed(self, path: str, values: Any, statement: bytes) -> str | None:
        if values is None:
            self.unsigned.append(path)
            return None
        try:
            signature = Signature.model_validate(values)
        except ValidationError as error:
            return f"has no readable signature: {error.errors()[0]['msg']}"
        self.keys.add(signature.key)
        if signature.key not in self._node_keys():
            return f"is signed by {signature.key}, which is the key of no node in this bundle"
        problem = signature_problem(signature, statement)
        return None if problem is None else f"its signature {problem}"

    def _node_keys(self) -> set[str | None]:
        nodes = (self._json(path) for path in self._files if path.startswith("nodes/"))
        return {node["registration"].get("public_key") for node in nodes}

    def _json(self, path: str) -> Any:
        return json.loads(self._files[path])
