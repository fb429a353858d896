"""Canonical JSON and SHA-256 digests: equal content gives equal digests on every machine."""

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Serialise `value` with sorted keys, no spaces, no NaN; floats print as Python's shortest repr."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Return "sha256:<hex>" of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value).encode())


def digest_bytes(data: bytes) -> str:
    """Return "sha256:<hex>" of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
