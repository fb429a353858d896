"""Forgeries of a real signed bundle: the published table says what catches each, and what nothing catches."""

import random

import pytest

from tests import forgeries
from tests.forgeries import EDITS, HOLDERS, NOTHING, caught_by, forged, original, published

TABLE = {
    name: tuple(cells)
    for names, *cells in ([cell.strip() for cell in line.strip("|\n").split("|")] for line in published().splitlines())
    for name in names.split("; ")
    if name in EDITS
}


def test_the_original_passes() -> None:
    assert caught_by(original()) == NOTHING


def test_the_published_table_is_what_the_code_catches() -> None:
    assert forgeries.rows() == TABLE, "run `python -m tests.forgeries`, and read the difference"
    assert len(EDITS) >= 40


def test_only_the_owner_of_the_key_passes() -> None:
    for holder, caught in zip(HOLDERS, zip(*TABLE.values(), strict=True), strict=True):
        assert (NOTHING in caught) is (holder == "own key")


DRAWS = random.Random(20261126)  # noqa: S311  # reproducible draws


@pytest.mark.parametrize(
    ("name", "holder", "place"),
    [(DRAWS.choice(sorted(EDITS)), DRAWS.choice(sorted(HOLDERS)), DRAWS.randint(1, 10**6)) for _ in range(20)],
)
def test_another_place_and_value_is_caught_alike(name: str, holder: str, place: int) -> None:
    files = forged(name, HOLDERS[holder], place)
    assert caught_by(files) == TABLE[name][list(HOLDERS).index(holder)]
