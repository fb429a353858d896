from pathlib import Path

import pytest

from ablate.model.config import DataConfig
from ablate.model.data.corpus import read_documents, split_corpus
from ablate.model.data.joined_corpus import FILES, MAX_MIB, join, main
from ablate.model.errors import DataError


def test_a_side_is_one_document_and_holds_the_text_of_that_side(tmp_path: Path) -> None:
    split = join(tmp_path / "joined")
    whole = split_corpus(DataConfig(max_corpus_mib=MAX_MIB))
    assert [file.relative for file in split.train] == [FILES["train"]]
    assert [file.relative for file in split.val] == [FILES["val"]]
    for files, joined in ((whole.train, split.train), (whole.val, split.val)):
        texts = list(read_documents(files))
        assert len(texts) > 1
        assert list(read_documents(joined)) == ["\n".join(texts)]


@pytest.mark.parametrize("place", ["full", "file"])
def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, place: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match="allowed: a new or an empty folder"):
        join(tmp_path / place)
    assert [path.read_text() for path in sorted(tmp_path.rglob("*")) if path.is_file()] == ["mine", "mine"]


@pytest.mark.parametrize(("arguments", "said"), [([], "0 arguments"), (["a", "b"], "2 arguments"), (["a"], "absolute")])
def test_bad_arguments_are_told(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_what_was_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "joined")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["train", "validate"]
    assert [line.split()[1] for line in said] == [str(tmp_path / "joined" / name) for name in FILES.values()]
