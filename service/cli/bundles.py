"""Bundles as commands take them."""

from pathlib import Path

from experiments.errors import BundleError, SpecProblem
from experiments.records.bundle import Bundle
from experiments.records.bundle_files import read_bundle_files
from experiments.records.bundle_reader import open_bundle


def read_bundle(path: Path) -> tuple[dict[str, bytes], Bundle]:
    """Return a bundle's files and what they say. Raises BundleError with the bundle's name in front of each file's."""
    try:
        files = read_bundle_files(path)
        return files, open_bundle(files)
    except BundleError as error:
        named = [SpecProblem(pointer=f"{path}: {p.pointer}", detail=p.detail, hint=p.hint) for p in error.problems]
        raise BundleError(named) from error
