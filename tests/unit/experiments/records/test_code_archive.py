"""Archives of code: equal trees give equal bytes, and a hostile archive leaves nothing outside and nothing large."""

import gzip
import hashlib
import io
import os
import random
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ablate.experiments.errors import CodeArchiveError
from ablate.experiments.records import code_archive, code_tree
from ablate.experiments.records.code_archive import ASKED, pack_code, unpack_code
from ablate.experiments.records.code_tree import tree_digest
from tests.repositories import walked


def packed(folder: Path, target: Path) -> str:
    """Pack a folder, unpack it as `target`, and return the digest of its tree."""
    code = pack_code(folder)
    archive = target.with_suffix(".tar.gz")
    archive.write_bytes(b"".join(code.pieces()))
    assert code.digest == f"sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}"
    assert code.size == archive.stat().st_size
    unpack_code(archive, target)
    assert tree_digest(target) == code.tree
    return code.tree


def random_tree(folder: Path, draw: random.Random) -> None:
    folder.mkdir(parents=True)
    folders = [folder]
    for number in range(draw.randrange(1, 40)):
        name = "".join(draw.choice("aZ09 .-_é漢\udcff'\"\\*") for _ in range(draw.randrange(1, 60))).strip(".") + str(
            number
        )
        above = draw.choice(folders)
        if draw.random() < 0.25 and len(str(above)) < 400:
            folders.append(above / name)
            folders[-1].mkdir()
        elif draw.random() < 0.15:
            (above / name).symlink_to(draw.choice([".", "missing", name, "a b", "./x", "x/"]))
        else:
            (above / name).write_bytes(draw.randbytes(draw.choice([0, 1, 511, 512, 513, 10_240, 70_000])))
            (above / name).chmod(draw.choice([0o644, 0o755, 0o600, 0o444, 0o700]))
    (folder / "last").write_text("x")


@pytest.mark.parametrize("seed", range(60))
def test_random_trees_are_the_same_after_unpacking(tmp_path: Path, seed: int) -> None:
    random_tree(tmp_path / "tree", random.Random(seed))  # noqa: S311 - a reproducible draw
    packed(tmp_path / "tree", tmp_path / "copy")
    assert walked(tmp_path / "copy") == walked(tmp_path / "tree")


def test_equal_files_give_equal_bytes_whatever_their_times_and_order(tmp_path: Path) -> None:
    for name, order in (("one", "abc"), ("two", "cab")):
        for letter in order:
            (tmp_path / name / letter).mkdir(parents=True)
            (tmp_path / name / letter / "file").write_text(letter)
            os.utime(tmp_path / name / letter / "file", (ord(letter), len(name)))
        (tmp_path / name / "a" / "file").chmod(0o600 if name == "one" else 0o664)
    one, two = pack_code(tmp_path / "one"), pack_code(tmp_path / "two")
    assert (one.digest, one.tree, one.size) == (two.digest, two.tree, two.size)
    changed = {one.tree}
    for change in (
        lambda file: file.chmod(0o755),
        lambda file: file.write_text("x"),
        lambda file: file.rename(file.parent / "g"),
    ):
        change(tmp_path / "two/a/file")
        changed.add(pack_code(tmp_path / "two").tree)
    assert len(changed) == 4


def git(folder: Path, *arguments: str) -> None:
    named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
    subprocess.run(["git", "-C", str(folder), *named, *arguments], check=True, capture_output=True)


def test_of_a_work_tree_the_files_that_git_does_not_ignore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "lab"
    for name in (
        "src/train.py",
        "src/big.bin",
        "src/deleted.py",
        "src/new.py",
        "inner/x.py",
        ".venv/lib/y.py",
        "env/pyvenv.cfg",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / ".gitignore").write_text("*.bin\nbuild\n")
    git(tree, "init", "-q")
    git(tree, "add", "src/train.py", "src/deleted.py", ".gitignore")
    git(tree, "commit", "-qm", "x")
    (tree / "src/deleted.py").unlink()
    (tree / "src/train.py").write_text("changed")
    git(tree / "inner", "init", "-q")
    (tree / "inner/.gitignore").write_text("no.py")
    (tree / "inner/no.py").write_text("")
    (tree / "moved").symlink_to("src")
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    packed(tree, tmp_path / "copy")
    names = {"src/train.py", "src/new.py", ".gitignore", "inner/x.py", "inner/.gitignore", "moved"}
    assert {os.fsdecode(name) for name in walked(tmp_path / "copy")} == names
    packed(tree / "src", tmp_path / "part")
    assert {os.fsdecode(name) for name in walked(tmp_path / "part")} == {"train.py", "new.py"}
    (tree / "build").mkdir()
    (tree / "build/x").write_text("")
    with pytest.raises(CodeArchiveError, match="git ignores all files"):
        pack_code(tree / "build")


def test_a_spec_that_ask_wrote_beside_the_program_is_no_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "ask-own.yaml").write_text("lr: 1e-3")
    before = pack_code(tmp_path)
    (tmp_path / "ask-lr-2e-3.yaml").write_text(f"{ASKED}, which overwrites it.\n")
    after = pack_code(tmp_path)
    assert (after.digest, after.names()) == (before.digest, {"train.py", "ask-own.yaml"})
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    assert pack_code(tmp_path).digest == before.digest
    (tmp_path / "ask-lr-2e-3.yaml").rename(tmp_path / "mine.yaml")
    assert pack_code(tmp_path).names() == {"train.py", "ask-own.yaml", "mine.yaml"}


def test_a_tracked_file_behind_a_link_is_not_read_through_it(tmp_path: Path) -> None:
    tree = tmp_path / "lab"
    (tree / "data").mkdir(parents=True)
    (tree / "data/x").write_text("x")
    git(tree, "init", "-q")
    git(tree, "add", "data/x")
    (tree / "data/x").unlink()
    (tree / "data").rmdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/x").write_text("secret")
    (tree / "data").symlink_to("../outside")
    with pytest.raises(CodeArchiveError, match=r"link to another place: data -> \.\./outside"):
        pack_code(tree)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: os.mkfifo(folder / "pipe"), "'pipe' is a pipe, a socket or a device"),
        (lambda folder: (folder / "up").symlink_to("../x"), "link to another place: up -> ../x"),
        (lambda folder: (folder / "own").symlink_to(folder / "a"), "link to another place: own -> /"),
        (lambda folder: (folder / "new\nline").write_text(""), "control character"),
    ],
)
def test_a_folder_that_no_node_would_unpack_is_not_packed(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/a").write_text("")
    spoil(tmp_path / "a")
    with pytest.raises(CodeArchiveError, match=words):
        pack_code(tmp_path / "a")


def limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    for module in (code_archive, code_tree):
        for name, value in limits.items():
            monkeypatch.setattr(module, name, value)


def test_limits_at_their_edges_name_what_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, MOST_BYTES=5_000, MOST_FILES=5)
    tree = tmp_path / "a"
    (tree / "sub").mkdir(parents=True)
    for number in range(3):
        (tree / f"sub/{number}").write_text("")
    (tree / "large").write_bytes(bytes(4_999))
    (tree / "small").write_text("x")
    packed(tree, tmp_path / "edge")
    (tree / "small").write_text("xx")
    with pytest.raises(CodeArchiveError, match=r"5,001 bytes; .*'large' 4,999, 'small' 2"):
        pack_code(tree)
    (tree / "small").write_text("x")
    (tree / "more").write_text("")
    with pytest.raises(CodeArchiveError, match=r"6 files; .*'sub' 3"):
        pack_code(tree)
    (tree / "large").write_bytes(random.Random(1).randbytes(4_990))  # noqa: S311 - a reproducible draw
    (tree / "more").unlink()
    with pytest.raises(CodeArchiveError, match="when packed; allowed: 5,000"):
        pack_code(tree)
    for empty in (tmp_path / "empty", tmp_path / "absent"):
        empty.mkdir() if empty.name == "empty" else None
        with pytest.raises(CodeArchiveError, match=r"has no files|is no folder"):
            pack_code(empty)


def made(path: Path, *members: tuple[dict[str, object], bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w:gz", format=form) as tar:
        for fields, content in members:
            member = tarfile.TarInfo(str(fields["name"]))
            member.size = len(content)
            for name, value in fields.items():
                setattr(member, name, value)
            tar.addfile(member, io.BytesIO(content))
    return path


def one(name: str, content: bytes = b"x", **fields: object) -> tuple[dict[str, object], bytes]:
    return {"name": name, **fields}, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[dict[str, object], bytes]:
    return {"name": name, "type": kind, "linkname": target}, b""


SPARSE = {f"GNU.sparse.{name}": value for name, value in (("major", "1"), ("minor", "0"), ("realsize", str(2**50)))}
HOSTILE = {
    "absolute": [one("/ablate-escaped")],
    "above": [one("../escaped")],
    "inner dots": [one("a/../../escaped")],
    "dot": [one("./a")],
    "twice a slash": [one("a//b")],
    "twice": [one("a"), one("a")],
    "twice a link": [link("a", "b"), one("a")],
    "file below a file": [one("a"), one("a/b")],
    "file where a folder is": [one("a/b"), one("a")],
    "below a link": [link("a", "."), one("a/b")],
    "link outside": [link("a", "../x")],
    "absolute link": [link("a", "/etc/passwd")],
    "link through a link": [one("d/e/f"), link("d/e/l", "../.."), link("m", "d/e/l/../x")],
    "links in a circle outside": [link("b", "a/../../x"), link("a", ".")],
    "hard link": [one("a"), link("b", "a", tarfile.LNKTYPE)],
    "hard link outside": [link("b", "/etc/passwd", tarfile.LNKTYPE)],
    "device": [({"name": "null", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b"")],
    "pipe": [({"name": "pipe", "type": tarfile.FIFOTYPE}, b"")],
    "unknown kind": [({"name": "x", "type": b"Z"}, b"")],
    "control character": [one("a\x1b[2J")],
    "new line": [one("a\nb")],
    "long name": [one("a" * 256)],
    "long path": [one("/".join(["a" * 100] * 11))],
    "sparse": [({"name": "s", "pax_headers": SPARSE}, b"0\n" + bytes(510))],
    "old sparse": [({"name": "s", "type": tarfile.GNUTYPE_SPARSE}, b"")],
    "large by its header": [({"name": "x", "pax_headers": {"size": str(2**40)}}, b"x")],
    "negative": [({"name": "x", "pax_headers": {"size": "-1"}}, b"x")],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing_outside(tmp_path: Path, name: str) -> None:
    archive = made(tmp_path / "a.tar.gz", *HOSTILE[name])
    with pytest.raises(CodeArchiveError):
        unpack_code(archive, tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} <= {"a.tar.gz", "target"}
    assert not Path("/ablate-escaped").exists()
    inside = [path for path in (tmp_path / "target").rglob("*") if not path.is_symlink() and path.is_file()]
    assert sum(path.stat().st_size for path in inside) < 10_000


def test_of_a_header_only_the_executable_bit_counts(tmp_path: Path) -> None:
    members = [
        one(f"{mode:o}", mode=mode, uid=12345, uname="x", mtime=2**33) for mode in (0o7755, 0o4000, 0o666, 0o100, 0)
    ]
    unpack_code(made(tmp_path / "a.tar.gz", *members, one("d/x", mode=0o7777)), tmp_path / "target")
    status = {path.name: path.stat() for path in (tmp_path / "target").iterdir()}
    modes = {name: stat.S_IMODE(one.st_mode) for name, one in status.items() if name != "d"}
    assert modes == {"7755": 0o755, "4000": 0o644, "666": 0o644, "100": 0o755, "0": 0o644}
    assert {one.st_uid for one in status.values()} == {os.getuid()}
    assert not status["d"].st_mode & 0o7000


def test_names_that_differ_by_case_stay_two_files(tmp_path: Path) -> None:
    unpack_code(made(tmp_path / "a.tar.gz", one("A", b"1"), one("a", b"2")), tmp_path / "target")
    assert [(tmp_path / "target" / name).read_bytes() for name in "Aa"] == [b"1", b"2"]


def test_bombs_end_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, MOST_BYTES=100_000, MOST_FILES=50)
    many = made(tmp_path / "many.tar.gz", *(one(str(number), b"") for number in range(51)))
    folders = made(tmp_path / "folders.tar.gz", one("/".join(str(number) for number in range(53))))
    large = made(tmp_path / "large.tar.gz", one("x", bytes(100_001)))
    several = made(tmp_path / "several.tar.gz", one("x", bytes(60_000)), one("y", bytes(60_000)))
    endless = tmp_path / "endless.tar.gz"
    with gzip.open(endless, "wb") as file:
        for _ in range(1_000):
            file.write(bytes(10_000))
    header = made(tmp_path / "header.tar.gz", ({"name": "x", "pax_headers": {"comment": "x" * 2**20}}, b""))
    for archive in (many, folders, large, several, header):
        with pytest.raises(CodeArchiveError, match=r"more than|expands"):
            unpack_code(archive, tmp_path / archive.name.removesuffix(".tar.gz"))
    edge = made(tmp_path / "edge.tar.gz", *(one(f"{number}", bytes(2_000)) for number in range(50)))
    unpack_code(edge, tmp_path / "edge")
    assert tree_digest(tmp_path / "edge")
    unpack_code(endless, tmp_path / "endless")
    assert list((tmp_path / "endless").iterdir()) == []


def test_damaged_archives_are_refused_or_complete(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/train.py").write_bytes(random.Random(3).randbytes(20_000))  # noqa: S311 - a reproducible draw
    whole = b"".join(pack_code(tmp_path / "a").pieces())
    draw = random.Random(4)  # noqa: S311 - a reproducible draw
    for number in range(150):
        damaged = bytearray(whole)
        if number % 2:
            del damaged[draw.randrange(len(damaged)) :]
        for _ in range(draw.randrange(1, 4) if damaged else 0):
            damaged[draw.randrange(min(len(damaged), 600))] = draw.randrange(256)
        (tmp_path / "d.tar.gz").write_bytes(damaged)
        try:
            unpack_code(tmp_path / "d.tar.gz", tmp_path / f"copy-{number}")
        except CodeArchiveError:
            continue
        assert walked(tmp_path / f"copy-{number}").keys() <= {b"train.py"}
