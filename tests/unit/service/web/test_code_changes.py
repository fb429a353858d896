"""Changed lines of sent code, which a page shows for any two archives."""

import gzip
import io
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate.experiments.errors import CodeArchiveError
from ablate.experiments.records.code_archive import pack_code, read_files
from ablate.service.web.code_changes import (
    MOST_EXPANDED,
    MOST_LINES,
    MOST_PACKED,
    CodeChange,
    FileChange,
    _change,
    _difference,
)


def packed(folder: Path, files: dict[str, bytes]) -> bytes:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return b"".join(pack_code(folder).pieces())


def changed(folder: Path, old: dict[str, bytes], new: dict[str, bytes]) -> CodeChange:
    return _change("x", packed(folder / "old", old), packed(folder / "new", new))


def test_changed_new_and_removed_files_have_their_lines(tmp_path: Path) -> None:
    old = {"train.py": b"a\nb\nc\n", "same.py": b"x\n", "gone.py": b"1\n"}
    new = {"train.py": b"a\nB\nc\n", "same.py": b"x\n", "lib/new.py": b"2\n"}
    change = changed(tmp_path, old, new)
    assert (change.arm, change.left_out) == ("x", "")
    assert [(file.name, file.what) for file in change.files] == [
        ("gone.py", "removed file"),
        ("lib/new.py", "new file"),
        ("train.py", "+1 \N{MINUS SIGN}1"),
    ]
    assert change.files[2].lines[1:] == (("same", " a"), ("removed", "-b"), ("added", "+B"), ("same", " c"))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a\0b", b"x\n" * 5_000])
def test_files_that_are_no_text_or_long_are_named_only(tmp_path: Path, content: bytes) -> None:
    (file,) = changed(tmp_path, {"data.bin": b"1"}, {"data.bin": content}).files
    assert file == FileChange(name="data.bin", what="another file that is no text, or is long")


def test_a_page_shows_a_limited_number_of_lines_and_counts_the_rest(tmp_path: Path) -> None:
    new = {f"f{number}.py": b"line\n" * 50 for number in range(5)}
    change = changed(tmp_path, {"train.py": b"1\n"}, {**new, "train.py": b"1\n"})
    assert sum(len(file.lines) for file in change.files) == MOST_LINES
    assert change.left_out == f"The first {MOST_LINES} lines, and 2 more files."


@pytest.mark.parametrize("content", [b"", b"nothing", gzip.compress(b"no tar", mtime=0), b"\x1f\x8b\x08"])
def test_what_is_no_archive_is_said(tmp_path: Path, content: bytes) -> None:
    change = _change("x", packed(tmp_path / "old", {"a": b"1"}), content)
    assert change.files == ()
    assert change.left_out.startswith("Its code cannot be shown: ")


def test_an_archive_that_expands_without_end_is_not_read() -> None:
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w:gz") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 2 * MOST_EXPANDED
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    assert len(bomb.getvalue()) < MOST_PACKED
    with pytest.raises(CodeArchiveError, match="expands to more than 8,388,608 bytes"):
        read_files(bomb.getvalue(), most_bytes=MOST_EXPANDED)


lines = st.lists(st.sampled_from(["a", "b", "c", "", "--- x", "+++ y", "@@ z"]), max_size=12)


@given(lines, lines)
def test_the_difference_turns_the_old_lines_into_the_new_ones(old: list[str], new: list[str]) -> None:
    shown = list(_difference(old, new))
    assert bool(shown) is (old != new)
    added, removed = (Counter(text[1:] for tone, text in shown if tone == kind) for kind in ("added", "removed"))
    change = Counter(old)
    change.subtract(removed)
    change.update(added)
    assert +change == Counter(new)
