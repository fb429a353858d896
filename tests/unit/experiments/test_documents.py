import math
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ablate.experiments.digest import digest
from ablate.experiments.documents import Frozen, first_problem, move_aside, seal, seal_problem, write_whole


class Part(Frozen):
    number: float


class Page(Frozen):
    text: str
    parts: tuple[Part, ...]
    digest: str = ""


PAGES = st.builds(
    Page,
    text=st.text(),
    parts=st.lists(st.builds(Part, number=st.floats(allow_nan=False, allow_infinity=False)), max_size=3).map(tuple),
)


@given(PAGES)
def test_seal_holds_the_digest_of_everything_else(page: Page) -> None:
    sealed = seal(page)
    plain = sealed.model_dump(mode="json")
    assert sealed.digest == digest({key: value for key, value in plain.items() if key != "digest"})
    assert seal_problem(sealed) is None
    assert seal(sealed) == sealed


@given(PAGES, PAGES)
def test_seal_breaks_when_anything_changes(page: Page, other: Page) -> None:
    moved = other.model_copy(update={"digest": seal(page).digest})
    same = page.model_dump_json() == other.model_dump_json()
    assert (seal_problem(moved) is None) is same


def test_seal_refuses_numbers_that_json_cannot_carry() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal(Page(text="a", parts=(Part(number=math.inf),)))


def test_document_is_frozen_and_refuses_unknown_fields() -> None:
    part = Part(number=1)
    with pytest.raises(ValidationError, match="frozen"):
        part.number = 2
    with pytest.raises(ValidationError) as caught:
        Page.model_validate({"text": "a", "parts": [{"number": 1, "more": 2}]})
    assert first_problem(caught.value) == "parts.0.more: Extra inputs are not permitted"


def test_write_whole_replaces_and_leaves_no_part(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    (tmp_path / "result.json.part").write_text("left by a killed process")
    for text in ("old", "n\N{LATIN SMALL LETTER E WITH ACUTE}w"):
        write_whole(target, text)
        assert target.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [target]


def test_write_whole_keeps_the_old_file_when_the_text_cannot_be_written(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    write_whole(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "half \udcff")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_write_whole_sets_or_keeps_the_mode_and_follows_links(tmp_path: Path) -> None:
    target, link = tmp_path / "secret", tmp_path / "link"
    write_whole(target, "a", mode=0o600)
    link.symlink_to(target)
    write_whole(link, "b")
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode), link.is_symlink()) == ("b", 0o600, True)
    usual = tmp_path / "usual"
    usual.touch()
    write_whole(tmp_path / "report", "c")
    assert (tmp_path / "report").stat().st_mode == usual.stat().st_mode


def test_write_whole_leaves_a_first_file_and_writes_into_a_pipe(tmp_path: Path) -> None:
    write_whole(tmp_path / "key", "first", replace=False)
    write_whole(tmp_path / "key", "second", replace=False)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["first"]
    os.mkfifo(tmp_path / "pipe")
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "flows")
    reader.join()
    assert received == ["flows"]


def test_move_aside_takes_folders_and_keeps_earlier_ones(tmp_path: Path) -> None:
    for _ in range(2):
        (tmp_path / "state" / "inside").mkdir(parents=True)
        assert (move_aside(tmp_path / "state") / "inside").is_dir()
    assert len(list(tmp_path.iterdir())) == 2
