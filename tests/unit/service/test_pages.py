import random
import re

import pytest

from ablate.experiments.ids import id_pattern, new_id
from ablate.service.http.pagination import PLACE, decode_cursor, encode_cursor


@pytest.mark.parametrize("seed", range(200))
def test_every_cursor_fits_its_pattern_and_comes_back(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - draws that repeat
    places = tuple(draw.choice([0, 1, 9, 10, draw.randrange(10**9)]) for _ in range(2))
    assert re.fullmatch(f"{PLACE}[.]{PLACE}", encode_cursor(places))
    assert decode_cursor(encode_cursor(places), (-1, -1)) == places
    name = new_id("abl")
    assert re.fullmatch(id_pattern("abl").strip("^$"), encode_cursor((name,)))
    assert decode_cursor(encode_cursor((name,)), ("",)) == (name,)


@pytest.mark.parametrize("text", ["", "01", "-1", "1.", ".1", "1.2.3", "1 ", "+1", "1e3", "1_0", "٣", "10000000000"])
def test_what_no_page_handed_out_fits_no_pattern(text: str) -> None:
    assert not re.fullmatch(f"{PLACE}[.]{PLACE}", text)
    assert not re.fullmatch(PLACE, text)
