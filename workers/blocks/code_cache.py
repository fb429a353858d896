"""Archives of code on this node: fetched once, checked before every block, the oldest removed."""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ablate.experiments.outcomes import FailureClass
from ablate.experiments.records.code_archive import PIECE_BYTES
from ablate.experiments.records.code_tree import MOST_BYTES
from ablate.workers.commands.code_copy import KEPT, archive_path
from ablate.workers.errors import ApiRefused, ApiUnreachable, BlockBroken, BlockStopped, StaleLease
from ablate.workers.lease import Lease, StopReason

KEEP_BYTES = 2 * 2**30
"""Most bytes of all archives on a node."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Between attempts to fetch an archive."""

CodeSource = Callable[[str, str], Iterator[bytes]]
"""Yields the bytes of the archive with a digest, for an attempt. Raises ApiUnreachable, ApiRefused, StaleLease."""


class CodeCache:
    """The archives in the folder of prepared data."""

    def __init__(self, data_dir: Path, source: CodeSource) -> None:
        self._data_dir = data_dir
        self._source = source

    def need(self, attempt_id: str, digest: str, lease: Lease) -> None:
        """Make sure that an archive is here, with the bytes that its digest names.

        Raises:
            BlockBroken: it cannot be fetched or stored.
            BlockStopped: the block was stopped meanwhile.

        """
        path = archive_path(self._data_dir, digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if _digest_of(path) == digest:
                os.utime(path)
            else:
                self._fetch_patiently(attempt_id, digest, path, lease)
            _prune(path.parent, keep=path)
        except OSError as error:
            raise BlockBroken(FailureClass.INFRA_NODE, f"code {digest} cannot be stored: {error}") from error

    def _fetch_patiently(self, attempt_id: str, digest: str, path: Path, lease: Lease) -> None:
        problem = ""
        for pause_s in (*_PAUSES_S, 0.0):
            try:
                return self._fetch(attempt_id, digest, path, lease)
            except ApiUnreachable as error:
                problem = str(error)
            except ApiRefused as error:
                problem = str(error)
                break
            except StaleLease as error:
                raise BlockStopped(StopReason.FENCED) from error
            time.sleep(pause_s)
        raise BlockBroken(FailureClass.INFRA_CONTROL, f"code {digest} cannot be fetched: {problem}")

    def _fetch(self, attempt_id: str, digest: str, path: Path, lease: Lease) -> None:
        whole, size = hashlib.sha256(), 0
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
            with Path(folder, "archive").open("wb") as file:
                _go_on(lease)
                for piece in self._source(attempt_id, digest):
                    _go_on(lease)
                    whole.update(piece)
                    size += len(piece)
                    if size > MOST_BYTES:
                        raise ApiUnreachable(f"more than {MOST_BYTES:,} bytes arrived")
                    file.write(piece)
            if f"sha256:{whole.hexdigest()}" != digest:
                raise ApiUnreachable(f"{size:,} bytes arrived, which are not those that the digest names")
            Path(folder, "archive").replace(path)


def _go_on(lease: Lease) -> None:
    reason = lease.reason()
    if reason is not None:
        raise BlockStopped(reason)


def _digest_of(path: Path) -> str | None:
    whole = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                whole.update(piece)
    except FileNotFoundError:
        return None
    return f"sha256:{whole.hexdigest()}"


def _prune(folder: Path, *, keep: Path) -> None:
    """Remove the archives that were not used for the longest time, beyond the limits of number and size."""
    entries = [(path.stat(), path) for path in folder.iterdir() if path.is_file() and path != keep]
    entries.sort(key=lambda entry: entry[0].st_mtime, reverse=True)
    size = keep.stat().st_size
    for number, (status, path) in enumerate(entries, start=2):
        size += status.st_size
        if number > KEPT or size > KEEP_BYTES:
            path.unlink()
