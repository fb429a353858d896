"""A plan file together with the code that it names: one tar file, which people carry to a node without a service."""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from ablate.experiments.errors import PlanFileError
from ablate.experiments.records.bundle_files import PLAN
from ablate.experiments.records.code_archive import PIECE_BYTES, PackedCode
from ablate.experiments.records.code_tree import MOST_BYTES
from ablate.experiments.records.plan_file import MAX_PLAN_BYTES, PlanFile, plan_file_text, read_plan_file

SUFFIX = ".tar"
_README = """This tar file has the plan of an ablation (plan.json) and the code of its arms (code/*.tar.gz).
Run it on a node: ablate exec FILE --out bundle/
"""


def write_plan_archive(path: Path, file: PlanFile, archives: Sequence[PackedCode]) -> None:
    """Write a plan and its code into one tar file. Equal plans and archives give equal bytes."""
    part = path.with_name(path.name + ".part")
    text = {"README.txt": _README.encode(), PLAN: plan_file_text(file).encode()}
    try:
        with tarfile.open(part, "w") as tar:
            for name, content in text.items():
                tar.addfile(_member(name, len(content)), io.BytesIO(content))
            for packed in sorted(archives, key=lambda one: one.digest):
                packed.file.seek(0)
                tar.addfile(_member(_place(packed.digest), packed.size), packed.file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def _place(digest: str) -> str:
    return f"code/{digest.removeprefix('sha256:')}.tar.gz"


class PlanWithCode:
    """A plan on disk, as a JSON file or as a tar file with its code."""

    def __init__(self, path: Path) -> None:
        """Read the plan and check the digests of its code. Raises PlanFileError and OSError."""
        self._path = path
        with path.open("rb") as file:
            self._is_tar = file.read(1)[:1] not in {b"{", b""}
        if self._is_tar:
            self.plan_file = read_plan_file(b"".join(self._pieces(PLAN, MAX_PLAN_BYTES)))
        else:
            self.plan_file = read_plan_file(path.read_bytes())
        for digest in sorted(self.plan_file.code or ()):
            self._check(digest)

    def _check(self, digest: str) -> None:
        whole = hashlib.sha256()
        for piece in self.code(digest):
            whole.update(piece)
        if f"sha256:{whole.hexdigest()}" != digest:
            raise PlanFileError(
                f"{_place(digest)} in {self._path} was altered: its digest is sha256:{whole.hexdigest()}"
            )

    def code(self, digest: str) -> Iterator[bytes]:
        """Yield the bytes of an archive of code. Raises PlanFileError."""
        if not self._is_tar:
            raise PlanFileError(
                f"the plan names code {digest}, which {self._path} lacks; carry the tar file that "
                "`ablate plan SPEC --out plan.tar` wrote"
            )
        yield from self._pieces(_place(digest), MOST_BYTES)

    def _pieces(self, name: str, most_bytes: int) -> Iterator[bytes]:
        try:
            with tarfile.open(self._path, "r:") as tar:
                member = tar.getmember(name)
                source = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if source is None or member.size > most_bytes:
                    raise PlanFileError(f"{name} in {self._path} is no plain file, or too large")
                yield from _read(source)
        except (KeyError, tarfile.TarError, EOFError, OverflowError, UnicodeError) as error:
            detail = "write one with `ablate plan SPEC --out plan.tar`"
            raise PlanFileError(f"{self._path} is no plan with {name}: {error}; {detail}") from error


def _read(source: IO[bytes]) -> Iterator[bytes]:
    while piece := source.read(PIECE_BYTES):
        yield piece
