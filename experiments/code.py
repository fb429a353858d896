"""Which code is on this machine: one digest over the source files that decide what is measured."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parent.parent
"""Folder that holds the packages; the root of the checkout in a development install."""

CODE_PACKAGES = ("kernels", "model", "workers")
"""Packages whose source decides what is measured."""


def code_digest(root: Path = SOURCE_ROOT, packages: Iterable[str] = CODE_PACKAGES) -> str:
    """Return the digest over names and contents of all Python files of `packages`."""
    whole = hashlib.sha256()
    for path in sorted(path for package in packages for path in (root / package).rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return f"sha256:{whole.hexdigest()}"
