"""SHA-256 digests, equal on every machine: of JSON values, of bytes, and of the source code."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SOURCE_ROOT = Path(__file__).resolve().parent.parent
"""Folder of the packages; the root of the checkout in a development install."""

IMPORT_ROOT = Path(__file__).parents[2]
"""Folder from which `import ablate` works; in a development install its packages are links to those in SOURCE_ROOT."""

CODE_PACKAGES = ("kernels", "model", "workers")
"""Packages whose source code affects measurements."""


def canonical_json(value: Any) -> str:
    """Serialise `value` with sorted keys, no spaces, no NaN; floats print as Python's shortest repr."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Return "sha256:<hex>" of the canonical JSON of `value`."""
    return digest_bytes(canonical_json(value).encode())


def digest_bytes(data: bytes) -> str:
    """Return "sha256:<hex>" of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def code_digest(root: Path = SOURCE_ROOT, packages: Iterable[str] = CODE_PACKAGES) -> str:
    """Return the digest over names and contents of all Python files of `packages`."""
    whole = hashlib.sha256()
    for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return f"sha256:{whole.hexdigest()}"
