"""Bundles on disk: a folder, or a tar file of one. Files are read into memory; a bundle holds text, no data sets."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from experiments.records.bundle_archive import BundleSize, read_tar, refused
from experiments.records.bundle_paths import MANIFEST, WORK


def read_bundle_files(path: Path) -> dict[str, bytes]:
    """Return the files of the bundle at `path`, by path below it. Raises BundleError when there is no bundle."""
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_tar(path)
    raise refused(str(path), "there is no such folder or tar file")


def write_tar(files: Mapping[str, bytes], path: Path) -> None:
    """Write the files below one folder named after `path`; equal files give equal bytes."""
    folder = path.name.removesuffix(".tar")
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w") as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    part.replace(path)


def _read_folder(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    size = BundleSize(str(folder))
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.partition("/")[0] == WORK or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise refused(name, "is no plain file")
        size.add(path.stat().st_size)
        found[name] = path.read_bytes()
    return found


def _read_tar(path: Path) -> dict[str, bytes]:
    found = read_tar(path)
    roots = [name for name in found if PurePosixPath(name).name == MANIFEST]
    if len(roots) != 1:
        raise refused(str(path), f"holds {len(roots)} manifests; a bundle has one")
    prefix = roots[0].removesuffix(MANIFEST)
    return {name.removeprefix(prefix): data for name, data in found.items()}
