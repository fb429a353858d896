import pytest

from service.errors import Invalid
from service.pages import decode_cursor, encode_cursor


def test_cursor_round_trip() -> None:
    assert decode_cursor(encode_cursor(("abl_01",)), ("",)) == ("abl_01",)
    assert decode_cursor(encode_cursor((12, 3)), (0, 0)) == (12, 3)


@pytest.mark.parametrize(
    "cursor", ["", "A", "____", encode_cursor((1,)), encode_cursor(("a", "b")), encode_cursor((1, 2**40))]
)
def test_decode_cursor_refuses_what_no_page_handed_out(cursor: str) -> None:
    with pytest.raises(Invalid) as caught:
        decode_cursor(cursor, (-1, -1))
    assert caught.value.problems[0].pointer == "query:cursor"
