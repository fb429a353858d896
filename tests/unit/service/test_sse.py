from service.sse import frame


def test_frame_keeps_every_line_of_the_data() -> None:
    assert frame("log", 7, "one\ntwo") == "id: 7\nevent: log\ndata: one\ndata: two\n\n"
