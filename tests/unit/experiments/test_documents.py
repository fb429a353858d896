import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from experiments.digest import digest
from experiments.documents import Frozen, first_problem, seal, seal_problem


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
