"""The names of a bundle's files, and what on a disk is one; nothing here reads one."""

from pathlib import Path

MANIFEST, PLAN, BLOCK, RECEIPT, LOG = "manifest.json", "plan.json", "block.json", "receipt.json", "log.txt"
WORK = "work"
"""Folder of a running `ablate exec`; no part of the bundle."""

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")


def is_bundle(path: Path) -> bool:
    """Tell whether `path` is a folder with a manifest, or is named like a tar file."""
    return (path / MANIFEST).is_file() or (path.is_file() and path.name.endswith(TAR_SUFFIXES))
