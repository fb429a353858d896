import bz2
import errno
import gzip
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ablate.model.config import DataConfig
from ablate.model.data.corpus import check_texts, corpus_root, read_documents, split_corpus
from ablate.model.errors import DataError
from tests.corpora import copy_headers, small_config


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(files: tuple) -> list[str]:
    return [file.relative for file in files]


def test_torch_headers_are_found_without_importing_torch() -> None:
    script = (
        "import sys; from ablate.model.config import DataConfig; from ablate.model.data.corpus import split_corpus;"
        "split = split_corpus(DataConfig(max_corpus_mib=64)); assert 'torch' not in sys.modules;"
        "print(len(split.train) + len(split.val))"
    )
    process = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(process.stdout) > 1000


@pytest.mark.parametrize("corpus", ["torch-header", "relative/folder", ""])
def test_corpus_root_refuses_a_name_it_does_not_know(corpus: str) -> None:
    with pytest.raises(DataError, match="'torch-headers', 'torch-python' or an absolute folder path") as caught:
        corpus_root(corpus)
    assert repr(corpus) in str(caught.value)


def test_the_modules_of_torch_are_a_corpus_of_python_files() -> None:
    split = split_corpus(DataConfig(corpus="torch-python", max_corpus_mib=0.5))
    files = [*split.train, *split.val]
    assert len(files) > 5
    assert {file.path.suffix for file in files} == {".py"}
    check_texts(files)


def test_corpus_root_refuses_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        corpus_root(str(tmp_path / "nowhere"))


def test_corpus_root_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is not a folder"):
        corpus_root(str(tmp_path / "file"))


def test_split_corpus_refuses_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 0 usable files .* at least 2"):
        split_corpus(small_config(tmp_path))


def test_split_corpus_leaves_out_hidden_linked_and_empty_files(tmp_path: Path) -> None:
    write(tmp_path, one="1", two="2", empty="")
    write(tmp_path / ".git", object="3")
    (tmp_path / ".hidden").write_text("4")
    (tmp_path / "link.h").symlink_to(tmp_path / "one.h")
    split = split_corpus(small_config(tmp_path))
    assert sorted(names(split.train + split.val)) == ["one.h", "two.h"]


def test_split_corpus_gives_the_same_order_whatever_the_order_of_creation(tmp_path: Path) -> None:
    texts = {f"file{number:02}": "x" for number in range(30)}
    forward = split_corpus(small_config(write(tmp_path / "a", **texts)))
    backward = split_corpus(small_config(write(tmp_path / "b", **dict(reversed(texts.items())))))
    assert names(forward.train) == names(backward.train)
    assert names(forward.val) == names(backward.val)
    assert names(forward.train) != sorted(names(forward.train))


def test_split_corpus_takes_whole_files_within_the_cap_from_the_whole_tree() -> None:
    split = split_corpus(DataConfig(max_corpus_mib=1))
    taken = split.train + split.val
    assert 0.95 * 2**20 < sum(file.size_bytes for file in taken) <= 2**20
    assert {"ATen", "c10", "torch"} <= {file.relative.split("/")[0] for file in taken}


def test_split_corpus_refuses_a_cap_below_the_files(tmp_path: Path) -> None:
    write(tmp_path, big="x" * 200_000, bigger="y" * 300_000)
    with pytest.raises(DataError, match=r"has 0 usable files within 0\.1 MiB"):
        split_corpus(small_config(tmp_path, max_corpus_mib=0.1))


def test_split_corpus_holds_out_the_asked_share_and_no_file_twice() -> None:
    split = split_corpus(DataConfig(max_corpus_mib=16, val_fraction=0.05))
    train, val = set(names(split.train)), set(names(split.val))
    assert not train & val
    assert 0.035 < len(val) / len(train | val) < 0.065


def test_split_corpus_keeps_a_file_on_its_side_when_others_come(tmp_path: Path) -> None:
    write(tmp_path, **{f"file{number:03}": "x" for number in range(100)})
    before = split_corpus(small_config(tmp_path))
    write(tmp_path, **{f"new{number:03}": "x" for number in range(100)})
    after = split_corpus(small_config(tmp_path))
    assert set(names(before.val)) <= set(names(after.val))
    assert set(names(before.train)) <= set(names(after.train))


@pytest.mark.parametrize("val_fraction", [0.001, 0.5])
def test_split_corpus_never_leaves_a_side_empty(tmp_path: Path, val_fraction: float) -> None:
    for number in range(8):
        folder = write(tmp_path / str(number), **{f"a{number}": "1", f"b{number}": "2"})
        split = split_corpus(small_config(folder, val_fraction=val_fraction))
        assert len(split.train) == len(split.val) == 1


def test_content_digest_changes_with_content_alone(tmp_path: Path) -> None:
    folder = copy_headers(tmp_path)
    config = small_config(folder)
    before = split_corpus(config).content_digest
    edited = sorted(folder.iterdir())[0]
    times = edited.stat()
    os.utime(edited)
    assert split_corpus(config).content_digest == before
    edited.write_text(edited.read_text().replace("namespace", "Namespace"))
    os.utime(edited, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (edited.stat().st_size, edited.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    assert split_corpus(config).content_digest != before


def test_split_corpus_names_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, one="1", two="2") / "below"
    write(folder, three="3")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"corpus folder {folder} cannot be read: Permission denied"):
        split_corpus(small_config(tmp_path))


TEXT = "naïve text, line after line\n" * 40
OTHER: dict[str, tuple[bytes, str]] = {
    "utf-16": (TEXT.encode("utf-16"), "text in UTF-16"),
    "utf-16 without a mark": (TEXT.encode("utf-16-le"), "text in UTF-16"),
    "ascii in utf-16": (b"plain".decode().encode("utf-16-be"), "text in UTF-16"),
    "utf-32": (TEXT.encode("utf-32"), "text in UTF-32"),
    "utf-32 without a mark": (TEXT.encode("utf-32-be"), "text in UTF-32"),
    "latin-1": (TEXT.encode("latin-1"), "text in another encoding, such as Latin-1: byte 2 is 0xef"),
    "gzip": (gzip.compress(TEXT.encode()), "gzip data"),
    "bzip2": (bz2.compress(TEXT.encode()), "bzip2 data"),
    "xz": (lzma.compress(TEXT.encode()), "xz data"),
    "zstd": (b"\x28\xb5\x2f\xfd\x04\x58", "Zstandard data"),
    "zip": (b"PK\x03\x04\x14\x00\x00\x00", "a ZIP archive"),
    "parquet": (b"PAR1\x15\x04\x15\x80PAR1", "a Parquet file"),
    "png": (b"\x89PNG\r\n\x1a\n\x00", "a PNG image"),
    "tar": (b"file.txt" + bytes(500) + b"text", "binary data"),
    "random": (bytes(range(256)), "binary data"),
}


@pytest.mark.parametrize("kind", OTHER)
def test_check_texts_says_what_a_file_looks_like(tmp_path: Path, kind: str) -> None:
    content, looks = OTHER[kind]
    write(tmp_path, good="naïve", fine="日本語 \ufeff 🙂 \x1b[0m")
    (tmp_path / "other.h").write_bytes(content)
    split = split_corpus(small_config(tmp_path))
    with pytest.raises(DataError) as caught:
        check_texts(split.train + split.val)
    message = str(caught.value)
    assert f"1 of 3 corpus files are not text in UTF-8: {tmp_path}/other.h looks like {looks}" in message
    assert "allowed: text in UTF-8" in message


def test_check_texts_names_three_files_and_counts_the_rest(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.h").write_bytes(b"\xe9")
    split = split_corpus(small_config(tmp_path))
    with pytest.raises(DataError, match=r"5 of 5 corpus files .*; and 2 more; allowed") as caught:
        check_texts(split.train + split.val)
    assert str(caught.value).count("looks like") == 3


def test_read_documents_refuses_a_file_that_changed_after_the_split(tmp_path: Path) -> None:
    write(tmp_path, one="1", two="2")
    split = split_corpus(small_config(tmp_path))
    split.train[0].path.write_text("3")
    with pytest.raises(DataError, match=f"{split.train[0].relative} changed while the data was prepared"):
        list(read_documents(split.train))


def test_read_documents_names_the_file_that_disappeared(tmp_path: Path) -> None:
    write(tmp_path, one="1", two="2")
    split = split_corpus(small_config(tmp_path))
    split.train[0].path.unlink()
    with pytest.raises(DataError, match=f"{split.train[0].relative} cannot be read: No such file"):
        list(read_documents(split.train))
