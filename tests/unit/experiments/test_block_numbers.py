import re

import pytest

from ablate.experiments.block_numbers import block_index, block_list, block_name, block_number, place_number
from tests.architecture.pages import ROOT

OWN = "experiments/block_numbers.py"


def test_people_count_blocks_and_places_from_one() -> None:
    assert (block_number(0), place_number(0)) == (1, 1)
    assert (block_name(1), block_name(1, 6)) == ("block 2", "block 2/6")


def test_block_index_undoes_block_number() -> None:
    assert [block_index(block_number(index)) for index in range(200)] == list(range(200))


@pytest.mark.parametrize(
    ("indices", "text"), [([0, 1, 2, 5], "1-3, 6"), ([], ""), ([4], "5"), ([0, 2, 4], "1, 3, 5"), ([0, 1], "1-2")]
)
def test_block_list_shortens_runs(indices: list[int], text: str) -> None:
    assert block_list(indices) == text


def test_no_other_module_counts_blocks_for_people() -> None:
    by_hand = re.compile(
        r"\bindex \+ 1\b|\bposition \+ 1\b|\"[^\"]*\bblock \{[^}]*(?:index|number)(?!!r)|str\([\w.]*index\)"
    )
    places = {
        f"{path.relative_to(ROOT).as_posix()}:{number}"
        for package in ("experiments", "service", "workers")
        for path in (ROOT / package).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if by_hand.search(line) and path.relative_to(ROOT).as_posix() != OWN
    }
    assert places == set()
