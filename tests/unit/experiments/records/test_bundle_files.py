"""Archives that anybody may have made: every one is read whole or refused with a sentence, and none costs much."""

import gzip
import io
import random
import resource
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ablate.experiments.errors import BundleError
from ablate.experiments.records.bundle import Bundle
from ablate.experiments.records.bundle_files import MAX_BUNDLE_BYTES, MAX_BUNDLE_FILES, read_bundle_files, write_tar
from ablate.experiments.records.bundle_reader import open_bundle
from tests.bundles import make_bundle, make_file
from tests.waiting import LIMIT_S

FILES = make_bundle(make_file(), [0, 1])
MIB = 2**20


def _tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], **options: object) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w", **options) as archive:  # type: ignore[call-overload]
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def _named(name: str, **values: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for field, value in values.items():
        setattr(member, field, value)
    return member


def _zeros(path: Path, head: bytes, count_mib: int) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(count_mib):
            file.write(bytes(MIB))
    return path


def _one_large_file(path: Path) -> Path:
    return _zeros(path, _named("b/manifest.json", size=450 * MIB).tobuf(), 450)


def _a_large_header(path: Path) -> Path:
    """A pax header of 450 MB, which the standard library would read whole before anybody sees a name."""
    return _zeros(path, _named("b/pax", size=450 * MIB, type=tarfile.XHDTYPE).tobuf(), 450)


def _a_large_name(path: Path) -> Path:
    return _zeros(path, _named("b/name", size=450 * MIB, type=tarfile.GNUTYPE_LONGNAME).tobuf(), 450)


def _many_files(path: Path) -> Path:
    head = b"".join(_named(f"b/{number}").tobuf() for number in range(MAX_BUNDLE_FILES + 2))
    return _zeros(path, head, 0)


def _sparse(path: Path) -> Path:
    """Eight terabytes in 512 bytes."""
    member = _named("b/manifest.json", type=tarfile.GNUTYPE_SPARSE, size=512)
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    head[386:398], head[398:410] = b"00000000000\0", b"00000001000\0"
    head[483:495] = b"\x80" + (8 * 2**40).to_bytes(11, "big")
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    path.write_bytes(bytes(head) + bytes(512) + bytes(1024))
    return path


def _sparse_by_pax(path: Path) -> Path:
    fields = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(8 * 2**40)}
    fields["GNU.sparse.name"] = "b/manifest.json"
    member = _named("b/sparse", pax_headers=fields)
    return _tar(path, [(member, b"1\n8796093022208\n0\n".ljust(512, b"\0"))], format=tarfile.PAX_FORMAT)


BOMBS: list[tuple[Callable[[Path], Path], str]] = [
    (_one_large_file, f"holds more than the {MAX_BUNDLE_BYTES} bytes allowed"),
    (_a_large_header, f"holds more than the {MAX_BUNDLE_BYTES} bytes allowed"),
    (_a_large_name, f"holds more than the {MAX_BUNDLE_BYTES} bytes allowed"),
    (_many_files, f"holds more than the {MAX_BUNDLE_FILES} files allowed"),
    (_sparse, "is not a plain file"),
    (_sparse_by_pax, "is not a plain file"),
]
READ_WITH_LITTLE = """
import resource, sys
from pathlib import Path
from ablate.experiments.errors import BundleError
from ablate.experiments.records.bundle_files import read_bundle_files
resource.setrlimit(resource.RLIMIT_AS, (900 * 2**20, 900 * 2**20))
try:
    read_bundle_files(Path(sys.argv[1]))
except BundleError as error:
    print(error.problems[0].detail)
"""


@pytest.mark.parametrize(("make", "message"), BOMBS, ids=lambda value: getattr(value, "__name__", ""))
def test_an_archive_that_grows_is_refused_before_it_has_grown(
    make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    """In a process that may not have more than 900 MB; the bundle's own limit is 256."""
    path = make(tmp_path / "b.tar.gz")
    assert path.stat().st_size < 8 * MIB
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_LITTLE, str(path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (message, "")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_what_is_no_plain_file_is_refused(kind: bytes, tmp_path: Path) -> None:
    link = _named("b/manifest.json", type=kind, linkname="/etc/passwd")
    with pytest.raises(BundleError, match="is not a plain file"):
        read_bundle_files(_tar(tmp_path / "b.tar", [(link, b"")]))


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    members = [(_named(f"b/{name}"), data) for name, data in FILES.items()]
    members.append((_named("b/manifest.json"), b"{}"))
    with pytest.raises(BundleError, match="is in the archive twice"):
        read_bundle_files(_tar(tmp_path / "b.tar", members))


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_archive_is_refused_or_still_says_what_it_said(seed: int, suffix: str, tmp_path: Path) -> None:
    """Random damage of every kind: either an error of ours, or the very bundle that went in."""
    draw = random.Random(f"{seed}{suffix}")  # noqa: S311 - draws that repeat
    plain = tmp_path / "b.tar"
    write_tar(FILES, plain)
    data = bytearray(plain.read_bytes())
    if suffix == ".tar.gz" and draw.random() < 0.5:
        data = bytearray(gzip.compress(_damaged(data, draw), mtime=0))
    elif suffix == ".tar.gz":
        data = _damaged(bytearray(gzip.compress(bytes(data), mtime=0)), draw)
    else:
        data = _damaged(data, draw)
    path = tmp_path / f"c{suffix}"
    path.write_bytes(data)
    assert _read(path) in (None, open_bundle(FILES))


def _read(path: Path) -> Bundle | None:
    """The bundle, None where it was refused with something said."""
    try:
        return open_bundle(read_bundle_files(path))
    except BundleError as error:
        if not all(problem.detail for problem in error.problems):
            raise
        return None


def _damaged(data: bytearray, draw: random.Random) -> bytearray:
    for _ in range(draw.choice([1, 1, 2, 10])):
        kind, place = draw.randrange(6), draw.randrange(max(1, len(data)))
        near = place - place % 512 + draw.randrange(512)  # in the header of a member, if there is one
        if kind == 0:
            del data[place:]
        elif kind == 1:
            data[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 2:
            data[near : near + 1] = bytes([draw.choice(b"0123456789SxgKLDVM\0\x80\xff ")])
        elif kind == 3:
            del data[place : place + draw.choice([1, 511, 512, 513])]
        elif kind == 4:
            data[place:place] = draw.randbytes(draw.choice([1, 512, 5000]))
        else:
            end = place + draw.choice([512, 1024, 4096])
            data[place:place] = data[place:end]
    return data


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_of_a_bundle_are_refused_with_their_names(seed: int) -> None:
    """Every file changed at random, also into things that parsers choke on."""
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    files = dict(FILES)
    path = draw.choice(sorted(files))
    nasty = [
        b"",
        b"null",
        b"[" * 100_000,
        b"{}",
        b"\xff\xfe",
        b"1" * 10_000,
        b'{"a":NaN}',
        b'"\\ud800"',
        b"1e999",
        b"[]",
    ]
    files[path] = draw.choice([*nasty, bytes(_damaged(bytearray(files[path]), draw))])
    if files[path] == FILES[path]:
        return
    with pytest.raises(BundleError) as caught:
        open_bundle(files)
    assert caught.value.problems


def test_this_test_can_measure_memory() -> None:
    """The limit that the other test relies on holds in a process of its own."""
    code = f"import resource; resource.setrlimit({resource.RLIMIT_AS}, (2**30, 2**30)); bytearray(1600 * 2**20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "MemoryError" in done.stderr
